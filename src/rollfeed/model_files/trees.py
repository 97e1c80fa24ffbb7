"""Attention over rows with branches: a prompt, and responses behind it that see the prompt and themselves.

On a CPU rows are short, and a mask over whole rows is added to all products. On a GPU, where rows may be long, each
response is attended by itself to the prompt and to its own places, by the kernels that causal attention has: no mask is
there, and nothing is computed that is masked away.

Axes: B rows, H heads, L places in a row, D numbers of a head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "rollfeed_branches"


class TreeRow(NamedTuple):
    """The places of a row: the prompt's, and where each branch begins and ends."""

    prompt_length: int
    branches: tuple[tuple[int, int], ...]


def tree_rows(branches_BL: NDArray[np.int32]) -> tuple[TreeRow, ...]:
    """Return the rows of numbered branches, 0 in the prompt, -1 behind the last one."""
    rows = []
    for branches_L in branches_BL:
        bounds = [0, *(np.flatnonzero(np.diff(branches_L)) + 1).tolist(), len(branches_L)]
        parts = [(start, end) for start, end in pairwise(bounds) if branches_L[start] >= 0]
        begins = bool(branches_L[0] == 0)
        rows.append(TreeRow(parts[0][1] if begins else 0, tuple(parts[1:] if begins else parts)))
    return tuple(rows)


def tree_mask(branches_BL: Tensor) -> Tensor:
    """Return the additive mask of rows with branches, ``(B, 1, L, L)``: a place sees the prompt and its own branch."""
    length = branches_BL.shape[1]
    seen_from = branches_BL[:, :, None]
    seen = branches_BL[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=branches_BL.device).tril()
    allowed = causal & ((seen == 0) | (seen == seen_from))
    blocked = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, blocked)[:, None]


def attend_in_blocks(model: Any) -> bool:
    """Have a model of transformers take the argument ``tree_rows``, and return whether it could be asked to.

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


def block_arguments(rows: tuple[TreeRow, ...], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a pass over rows with branches, for a model that attends in blocks."""
    # A mask that is there already is not made.
    return {"attention_mask": torch.zeros(1, 1, 1, 1, device=device), "tree_rows": rows}


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree_rows: tuple[TreeRow, ...] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if tree_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # which does so for the kernels that it knows
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attended_BHLD = torch.stack(
        [_attend_row(*each, row=row, scaling=scaling) for *each, row in zip(query, key, value, tree_rows, strict=True)]
    )
    return attended_BHLD.transpose(1, 2).contiguous(), None


def _attend_row(
    query_HLD: Tensor, key_HLD: Tensor, value_HLD: Tensor, *, row: TreeRow, scaling: float | None
) -> Tensor:
    prompt_length = row.prompt_length
    parts: list[Tensor] = []
    for start, end in ((0, prompt_length), *row.branches):
        if start == end:
            continue
        keys, values = (
            each[:, :end] if start <= prompt_length else torch.cat([each[:, :prompt_length], each[:, start:end]], dim=1)
            for each in (key_HLD, value_HLD)
        )
        attended = scaled_dot_product_attention(
            query_HLD[None, :, start:end],
            keys[None],
            values[None],
            attn_mask=causal_lower_right(end - start, keys.shape[1]),
            scale=scaling,
            enable_gqa=query_HLD.shape[0] != key_HLD.shape[0],
        )
        parts.append(attended[0])
    attended_HLD = torch.cat(parts, dim=1)
    padding = query_HLD.shape[1] - attended_HLD.shape[1]
    return torch.nn.functional.pad(attended_HLD, (0, 0, 0, padding)) if padding else attended_HLD
