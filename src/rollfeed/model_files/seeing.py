"""Models that see: which of their tokens stand for pictures, and how tokens and pixels go through them together.

A placeholder may also be sampled, as any other token. It is then one like the others: a server that decodes it looks up
its embedding. A model of transformers would count it among the places of pictures, which do not fit then; so another
token is given to it there, and the embedding is put right behind its back.

Axes: B rows, L places in a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
_TYPES = "mm_token_type_ids"
"""What models call an argument that says which tokens are text, 0, and which of images, 1."""
_OLD_TYPES = {"gemma3": "token_type_ids"}
"""The same of models that have no such argument; that of others may say something else."""


def sees(config: Any) -> bool:
    """Whether a model of this configuration of transformers takes pictures."""
    return getattr(config, "vision_config", None) is not None


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that stand for pictures; none where a model sees none."""
    found = (getattr(config, name, None) for name in _IDS)
    return tuple(dict.fromkeys(value for value in found if isinstance(value, int))) if sees(config) else ()


@contextmanager
def looking(
    model: Any, token_ids_BL: Tensor, *, is_picture_BL: Tensor, pixels: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of passes through the model that begin with these tokens and pictures.

    ``is_picture_BL`` says which tokens stand for pictures, in the order of these; other placeholders have been sampled.
    ``pixels`` are arrays by the names that the model has for them, all pictures in the order of their places.
    """
    ids = torch.tensor(placeholder_ids(model.config), device=token_ids_BL.device)
    sampled_BL = torch.isin(token_ids_BL, ids) & ~is_picture_BL
    arguments = {"input_ids": token_ids_BL.masked_fill(sampled_BL, 0), **_on_device(model, pixels)}
    known = inspect.signature(model.forward).parameters
    types = _TYPES if _TYPES in known else _OLD_TYPES.get(model.config.model_type)
    if types is not None and types in known:
        arguments[types] = (torch.isin(token_ids_BL, ids) & is_picture_BL).long()
    if not bool(sampled_BL.any()):
        yield arguments
        return

    def put_right(module: Any, inputs: Any, embedded: Tensor) -> Tensor:
        if embedded.shape[:2] != token_ids_BL.shape:  # of tokens that came later
            return embedded
        return torch.where(sampled_BL[..., None], module.forward(token_ids_BL), embedded)

    hook = model.get_input_embeddings().register_forward_hook(put_right)
    try:
        yield arguments
    finally:
        hook.remove()


def _on_device(model: Any, pixels: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: torch.tensor(values, device=model.device) for name, values in pixels.items()}
    return {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in tensors.items()}
