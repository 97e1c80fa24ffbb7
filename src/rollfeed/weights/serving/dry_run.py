"""The dry run: whether tensors are those that servers hold, by name, and fused or split as there.

A server answers 200 to a name that it does not know and keeps its old weight, and may end at a shape that does not fit:
so both are found here, before any server has anything.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from rollfeed.errors import CheckpointError
from rollfeed.model_files import TensorHeader
from rollfeed.weights.serving.form import head_of

_log = logging.getLogger(__name__)

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that some checkpoints have as one, with the rows of each one after another."""
_PART = re.compile(r"(.*?\.\d+|[^.]*)\.")
_SCALES = ("_scale", "_scale_inv")
_CONSTANT = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.(attn|attention)\.bias)$")
"""Tensors that old checkpoints carry and no model trains."""


def served_tensors(
    tensors: Mapping[str, Any], stored: Mapping[str, TensorHeader], *, tied_head: bool = False
) -> dict[str, Any]:
    """Return tensors, all numpy or all torch, by the names of the checkpoint that servers were started with.

    With ``tied_head`` an output head that is stored there and not given is the embeddings. What else is missing is
    refused, unless it is a part of the model that is not published at all, such as a draft head: that stays as servers
    have it, and is told of once.

    Raises:
        CheckpointError: If a name is unknown there, or some tensors of a part are missing; names one.
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        found |= {name: tensor} if name in stored else _split(name, tensor, stored)
    for name in stored:
        if name not in found and (parts := _parts_of(name, found)):
            found[name] = _joined([found.pop(part) for part in parts])
    if tied_head:
        heads = {head_of(name): tensor for name, tensor in found.items()}
        found |= {name: tensor for name, tensor in heads.items() if name in stored and name not in found}
    unknown = found.keys() - stored.keys() - {name for name in found if name.endswith("lm_head.weight")}
    if unknown:
        raise CheckpointError(
            f"weight {min(unknown)!r} is none that servers of this checkpoint have ({len(unknown)} are not): a server "
            "would say that it was taken, and change nothing; publish by the checkpoint's names"
        )
    _check_missing(found.keys(), stored)
    return found


def _split(name: str, tensor: Any, stored: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Return the parts of a fused tensor that servers hold apart; the tensor itself where there are none."""
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in stored for part in names):
            rows = [stored[part].shape[0] for part in names]
            if sum(rows) != tensor.shape[0]:
                raise CheckpointError(f"weight {name!r} has {tensor.shape[0]} rows, and its parts in servers {rows}")
            ends = [sum(rows[: index + 1]) for index in range(len(rows))]
            return {part: tensor[end - size : end] for part, size, end in zip(names, rows, ends, strict=True)}
    return {name: tensor}


def _parts_of(name: str, found: Collection[str]) -> list[str]:
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in found for part in names):
            return names
    return []


def _joined(tensors: list[Any]) -> Any:
    if hasattr(tensors[0], "is_contiguous"):
        import torch

        return torch.cat(tensors)
    import numpy as np

    return np.concatenate(tensors)


def _check_missing(found: Collection[str], stored: Mapping[str, TensorHeader]) -> None:
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for name in stored:
        is_scale = name.endswith(_SCALES) and name.removesuffix("_inv").removesuffix("_scale") in stored
        if name not in found and not is_scale and not _CONSTANT.search(name):
            missing[_part_of(name)].append(name)
    given, sizes = set(map(_part_of, found)), Counter(map(_part_of, stored))
    for part, names in missing.items():
        if part in given or sizes[part] == 1:
            raise CheckpointError(
                f"weight {min(names)!r} is missing ({len(names)} of {part!r} are): servers would go on with the old "
                "one; publish all of the model"
            )
    if missing:
        _log.warning("not published, and left as servers have it: %s", ", ".join(sorted(missing)[:4]))


def _part_of(name: str) -> str:
    """Return the layer that a tensor belongs to, or the first word of its name."""
    found = _PART.match(name)
    return found[1] if found else name
