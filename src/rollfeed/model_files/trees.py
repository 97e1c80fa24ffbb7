"""Attention over rows with branches: a prompt, and responses behind it that see the prompt and themselves.

Responses are attended to their prompt and to their own places, by the kernels that causal attention has, and little is
computed that is masked away: one response after another on a GPU, those of a prompt at once on a CPU. Several prompts
with their responses lie behind one another in a row. Where a model cannot be asked to, a mask over whole rows is added
to all products.

Axes: B rows, H heads, L places in a row, D numbers of a head; R responses, W places of the longest of them, S places
that one of them sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "rollfeed_branches"


class Tree(NamedTuple):
    """The places of a prompt in a row, and those of each response that goes on from it, right behind it."""

    start: int
    prompt_end: int
    branches: tuple[tuple[int, int], ...]

    @property
    def num_padded(self) -> int:
        """Places of the responses, were all as long as the longest."""
        return len(self.branches) * max((end - start for start, end in self.branches), default=0)


def trees_of(branches_L: NDArray[np.int32], position_ids_L: NDArray[np.int64]) -> tuple[Tree, ...]:
    """Return the trees of a row without padding: branches are numbered from 1, 0 is a prompt, which has position 0."""
    starts = np.flatnonzero(position_ids_L == 0).tolist()
    trees = []
    for start, end in pairwise([*starts, len(branches_L)]):
        bounds = [start, *(np.flatnonzero(np.diff(branches_L[start:end])) + start + 1).tolist(), end]
        (_, prompt_end), *branches = pairwise(bounds)
        trees.append(Tree(start, prompt_end, tuple(branches)))
    return tuple(trees)


def tree_mask(branches_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
    """Return the additive mask of rows with branches, ``(B, 1, L, L)``: a place sees its prompt and its own branch."""
    length = branches_BL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches_BL.device).tril()
    tree_BL = (position_ids_BL == 0).cumsum(dim=1)
    same_tree = tree_BL[:, None, :] == tree_BL[:, :, None]
    seen_from, seen = branches_BL[:, :, None], branches_BL[:, None, :]
    allowed = causal & same_tree & ((seen == 0) | (seen == seen_from))
    blocked = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, blocked)[:, None]


def attend_in_blocks(model: Any) -> bool:
    """Have a model of transformers take the argument ``trees``, and return whether it could be asked to.

    Passes without it are as before; whether those with it are right has to be tried.
    """
    if model.config._attn_implementation == _NAME:
        return True
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    try:
        model.set_attn_implementation(_NAME)
    except ValueError:
        return False
    return bool(model.config._attn_implementation == _NAME)


def block_arguments(trees: tuple[Tree, ...], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a pass over one row of trees, for a model that attends in blocks."""
    # A mask that is there already is not made.
    return {"attention_mask": torch.zeros(1, 1, 1, 1, device=device), "trees": trees}


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    trees: tuple[Tree, ...] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if trees is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # which does so for the kernels that it knows
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    inputs = tuple(each[0].transpose(0, 1) for each in (query, key, value))
    parts = [part for tree in trees for part in _attend_tree(*inputs, tree=tree, scaling=scaling)]
    return torch.cat(parts)[None], None


def _attend_tree(
    query_LHD: Tensor, key_LHD: Tensor, value_LHD: Tensor, *, tree: Tree, scaling: float | None
) -> Iterator[Tensor]:
    """Yield what the places of a tree find, in their order, ``(places, H, D)``."""
    start, prompt_end, branches = tree
    prompt = slice(start, prompt_end)
    yield _attend_rows(query_LHD[None, prompt], key_LHD[None, prompt], value_LHD[None, prompt], scaling)[0]
    lengths = [end - begin for begin, end in branches]
    if _has_mask(query_LHD) and lengths and tree.num_padded <= 2 * sum(lengths):
        behind = slice(prompt_end, branches[-1][1])
        # Padding is behind what is there, which does not see it.
        query_RWHD, *own = (
            pad_sequence(list(torch.split(each[behind], lengths)), batch_first=True)
            for each in (query_LHD, key_LHD, value_LHD)
        )
        key_RSHD, value_RSHD = (
            torch.cat([each[prompt].expand(len(lengths), -1, -1, -1), own_RWHD], dim=1)
            for each, own_RWHD in zip((key_LHD, value_LHD), own, strict=True)
        )
        attended_RWHD = _attend_rows(query_RWHD, key_RSHD, value_RSHD, scaling)
        yield from (attended_WHD[:length] for attended_WHD, length in zip(attended_RWHD, lengths, strict=True))
        return
    for begin, end in branches:
        keys, values = (torch.cat([each[prompt], each[begin:end]])[None] for each in (key_LHD, value_LHD))
        yield _attend_rows(query_LHD[None, begin:end], keys, values, scaling)[0]


def _attend_rows(query_RWHD: Tensor, key_RSHD: Tensor, value_RSHD: Tensor, scaling: float | None) -> Tensor:
    """Return what the last W of S places find in those up to their own, ``(R, W, H, D)``."""
    width, seen = query_RWHD.shape[1], key_RSHD.shape[1]
    mask_WS: Tensor | None = None
    if width < seen and _has_mask(query_RWHD):
        mask_WS = torch.ones(width, seen, dtype=torch.bool).tril(seen - width)
    elif width < seen:
        mask_WS = causal_lower_right(width, seen)
    return scaled_dot_product_attention(
        query_RWHD.transpose(1, 2),
        key_RSHD.transpose(1, 2),
        value_RSHD.transpose(1, 2),
        attn_mask=mask_WS,
        is_causal=mask_WS is None,
        scale=scaling,
        enable_gqa=query_RWHD.shape[2] != key_RSHD.shape[2],
    ).transpose(1, 2)


def _has_mask(query: Tensor) -> bool:
    """Whether what is causal from the end has a mask: CPUs have no kernel for it."""
    return query.device.type == "cpu"
