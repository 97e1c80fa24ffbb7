"""A reward model in a process of its own: called by name in a worker, which keeps the model between calls.

Axes: B rows, L places in a row, S places that are scored, C labels.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollfeed.errors import CheckpointError
from rollfeed.model_files.classifiers import load_classifier, logits_at, scores_every_place


def load(folder: str, device: str, precision: str) -> bool:
    """Load a model, unless it is there; return whether it scores every place. Raises CheckpointError if it cannot."""
    return scores_every_place(_model(folder, device, precision))


def score(
    folder: str, device: str, precision: str, texts: list[list[int]], places: list[list[int]]
) -> list[list[list[float]]]:
    """Return the logits of texts at their places, ``(S, C)`` for each.

    Raises:
        CheckpointError: If a model that pools by itself is asked for more than one score of a text.
    """
    model = _model(folder, device, precision)
    where = next(model.parameters()).device
    token_ids_BL = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.int64)
    mask_BL = torch.zeros_like(token_ids_BL)
    for row, text in enumerate(texts):
        token_ids_BL[row, : len(text)] = torch.tensor(text)
        mask_BL[row, : len(text)] = 1
    counts = [len(each) for each in places]
    with torch.inference_mode():
        if scores_every_place(model):
            rows_S = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(counts))
            columns_S = torch.tensor([place for each in places for place in each])
            logits_SC = logits_at(model, token_ids_BL.to(where), rows_S.to(where), columns_S.to(where))
        else:
            logits_SC = _pooled(model, token_ids_BL.to(where), mask_BL.to(where), places, folder=folder)
    return [each.tolist() for each in torch.split(logits_SC.float().cpu(), counts)]


def _pooled(model: Any, token_ids_BL: Tensor, mask_BL: Tensor, places: list[list[int]], *, folder: str) -> Tensor:
    """Return the logits of a model that has a head of its own, such as an encoder's."""
    if any(len(each) > 1 for each in places):
        raise CheckpointError(f"{folder}: this model scores whole texts only: set reward.model.unit = 'response'")
    logits: Tensor = model(input_ids=token_ids_BL, attention_mask=mask_BL).logits
    return logits if logits.ndim == 2 else logits[torch.arange(len(places)), mask_BL.sum(dim=1) - 1]


@lru_cache(maxsize=1)
def _model(folder: str, device: str, precision: str) -> Any:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    is_bf16 = precision == "bf16" or (precision == "auto" and device.startswith("cuda"))
    model = load_classifier(Path(folder), dtype=torch.bfloat16 if is_bf16 else torch.float32)
    return model.to(device).requires_grad_(False)
