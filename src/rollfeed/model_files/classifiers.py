"""Models that score texts: classifiers of transformers, and their logits at chosen places.

Axes: B rows, L places in a row, S places that are scored, C labels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rollfeed.errors import CheckpointError
from rollfeed.model_files.content import classified_unit, find_config, read_config
from rollfeed.model_files.loading import load_causal_model


def load_classifier(
    folder: Path,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    change_config: Callable[[Any], None] = lambda config: None,
    new_head: bool = False,
) -> Any:
    """Return the sequence or token classifier of a local folder, on the CPU and in evaluation mode.

    ``new_head`` takes a causal language model too, of which it becomes a classifier of one label, all scores 0.

    Raises:
        CheckpointError: As :func:`load_causal_model`, and if it is no classifier.
    """
    unit = classified_unit(folder)
    if unit is None and not new_head:
        names = (find_config(folder) or {}).get("architectures")
        raise CheckpointError(f"{folder}: no classifier: its config.json has architectures = {names!r}")
    if unit is None:
        read_config(folder)
    by_token = unit == "token"

    def change(config: Any) -> None:
        if unit is None:
            config.num_labels = 1
        change_config(config)

    return load_causal_model(
        folder,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        change_config=change,
        auto_model=AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification,
        new_head=new_head,
    )


def scores_every_place(model: Any) -> bool:
    """Whether a model has a linear head over what a causal model makes of each place, and no pooling of its own."""
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def logits_at(model: Any, token_ids_BL: Tensor, rows_S: Tensor, columns_S: Tensor) -> Tensor:
    """Return the logits at places of rows that are padded at their ends, ``(S, C)``.

    A place of a causal model sees nothing behind it, so padding changes nothing; the last token of a text is the one
    that is named, whatever the model's padding token is.
    """
    body = getattr(model, model.base_model_prefix)
    hidden_BLD = body(input_ids=token_ids_BL, use_cache=False).last_hidden_state
    logits_SC: Tensor = model.score(hidden_BLD[rows_S, columns_S])
    return logits_SC
