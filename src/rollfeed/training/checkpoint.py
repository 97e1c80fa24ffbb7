"""A trainer's state on disk: a folder with tensors (safetensors) and values (JSON), there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollfeed.base.atomic import replace_folder
from rollfeed.errors import CheckpointError

TENSORS_FILE = "trainer.safetensors"
VALUES_FILE = "trainer.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """All that a trainer needs to go on exactly where it was."""

    tensors: Mapping[str, Tensor]
    """``model/NAME``, ``exp_avg/NAME`` and ``exp_avg_sq/NAME`` for every parameter, ``buffer/NAME`` for every buffer
    that a checkpoint has; the trainer's own memory where it is on the CPU: write or copy them before the next update.
    """
    values: Mapping[str, Any]
    """JSON values."""


def write_state(state: TrainerState, folder: Path) -> None:
    """Write a state as a new folder, flushed to disk.

    Raises:
        CheckpointError: If there is something at ``folder`` already, or it cannot be written; nothing is left then.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: there is something already; a trainer's state is never written over")

    def fill(made: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, made / TENSORS_FILE)
        text = json.dumps({"format": _FORMAT, **state.values}, indent=1, sort_keys=True)
        (made / VALUES_FILE).write_text(text + "\n", encoding="utf-8")

    try:
        replace_folder(folder, fill)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the trainer's state cannot be written ({error})") from error


def read_state(folder: Path) -> TrainerState:
    """Return what :func:`write_state` wrote.

    Raises:
        CheckpointError: If it is not there, damaged, or of another format.
    """
    try:
        values = json.loads((folder / VALUES_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: no readable state of a trainer ({error})") from error
    found = values.pop("format", None) if isinstance(values, dict) else None
    if found != _FORMAT:
        raise CheckpointError(f"{folder / VALUES_FILE}: format {found!r} is not {_FORMAT}, the one that is read here")
    return TrainerState(tensors=tensors, values=values)
