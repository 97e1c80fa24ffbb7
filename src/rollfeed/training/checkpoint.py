"""A trainer's state on disk: a folder with tensors (safetensors) and values (JSON), there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollfeed.base.atomic import replace_folder, seal_folder, sealed_problems
from rollfeed.errors import CheckpointError
from rollfeed.model_files.low_rank import adapter_of, refuse_other_adapter
from rollfeed.training.optimizer import Optimizer
from rollfeed.training.ranks import ALONE, Ranks, fill, wholes

TENSORS_FILE = "trainer.safetensors"
VALUES_FILE = "trainer.json"
_FORMAT = 1
_REFERENCE = "reference/"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """All that a trainer needs to go on exactly where it was."""

    tensors: Mapping[str, Tensor]
    """``model/NAME``, ``exp_avg/NAME`` and ``exp_avg_sq/NAME`` for every parameter, ``buffer/NAME`` for every buffer
    that a checkpoint has, and ``reference/NAME`` for those of a reference that is refreshed; the trainer's own memory:
    write or copy them before the next update.
    """
    values: Mapping[str, Any]
    """JSON values."""


def state_of(model: Any, optimizer: Optimizer, *, step: int, reference: Mapping[str, Tensor]) -> TrainerState:
    """Return the state of a model, its optimizer and what is kept of its reference after ``step`` batches."""
    tensors, values = optimizer.state()
    parameters = {f"model/{name}": parameter.detach() for name, parameter in optimizer.parameters.items()}
    buffers = {f"buffer/{name}": buffer for name, buffer in buffers_of(model).items()}
    kept = {f"{_REFERENCE}{name}": tensor for name, tensor in reference.items()}
    told = {**values, "step": step, **({} if (adapter := adapter_of(model)) is None else {"lora": adapter})}
    return TrainerState(tensors={**parameters, **buffers, **tensors, **kept}, values=told)


def has_reference(state: TrainerState) -> bool:
    """Whether a state has a reference."""
    return any(name.startswith(_REFERENCE) for name in state.tensors)


def take_state(state: TrainerState, model: Any, optimizer: Optimizer, *, reference: Mapping[str, Tensor]) -> int:
    """Give a model and its optimizer the state of :func:`state_of`; return the batches it is after.

    ``reference`` are the tensors of the reference, which are left as they are where the state has none.

    Raises:
        CheckpointError: If it is of another model or adapter; nothing is changed then.
    """
    refuse_other_adapter(state.values.get("lora"), adapter_of(model))
    for name, parameter in optimizer.parameters.items():
        tensor = state.tensors.get(f"model/{name}")
        if tensor is None or tensor.shape != parameter.shape:
            raise CheckpointError(
                f"the trainer's state is of another model: it has no weight {name!r} of shape "
                f"{tuple(parameter.shape)}; start from the checkpoint that it was trained from"
            )
    told = {f"{_REFERENCE}{name}": tensor for name, tensor in reference.items()} if has_reference(state) else {}
    for name, tensor in told.items():
        if (stored := state.tensors.get(name)) is None or stored.shape != tensor.shape:
            raise CheckpointError(
                f"the trainer's state is of another reference: it has no {name!r} of shape {tuple(tensor.shape)}; set "
                "train.loss.reference_checkpoint and train.lora as they were"
            )
    optimizer.load_state(state.tensors, state.values)
    for name, parameter in optimizer.parameters.items():
        fill(parameter, state.tensors[f"model/{name}"])
    for name, buffer in buffers_of(model).items():
        fill(buffer, state.tensors.get(f"buffer/{name}", buffer))  # states of earlier versions have none
    for name, tensor in told.items():
        fill(tensor, state.tensors[name])
    return int(state.values["step"])


def buffers_of(model: Any) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, by the model's names."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def write_state(state: TrainerState, folder: Path, *, ranks: Ranks = ALONE) -> None:
    """Write a state as a new folder, flushed to disk; whoever trains with others has them all call it.

    Raises:
        CheckpointError: If there is something at ``folder`` already, or it cannot be written; nothing is left then.
    """
    # In the file each begins at a multiple of its items' size.
    tensors = dict(sorted(state.tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    buckets = wholes(tensors)
    if ranks.rank > 0:
        for _ in buckets:
            pass
        return

    def fill_folder(made: Path) -> None:
        _write_tensors(tensors, buckets, made / TENSORS_FILE)
        text = json.dumps({"format": _FORMAT, **state.values}, indent=1, sort_keys=True)
        (made / VALUES_FILE).write_text(text + "\n", encoding="utf-8")
        seal_folder(made)

    try:
        if folder.exists():
            raise CheckpointError(f"{folder}: there is something already; a trainer's state is never written over")
        replace_folder(folder, fill_folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the trainer's state cannot be written ({error})") from error
    finally:
        for _ in buckets:  # the others hand over all of it
            pass


def _write_tensors(tensors: Mapping[str, Tensor], buckets: Iterator[dict[str, Tensor]], path: Path) -> None:
    """Write a file of safetensors as its tensors come, of which few are in memory at a time."""
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bucket in buckets:
            for tensor in bucket.values():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_state(folder: Path) -> TrainerState:
    """Return what :func:`write_state` wrote.

    Raises:
        CheckpointError: If it is not there, damaged, or of another format.
    """
    for name, problem in sealed_problems(folder).items():
        if problem is not None:
            raise CheckpointError(
                f"{folder / name}: {problem}; move {folder} away, and an earlier state is gone on from"
            )
    try:
        values = json.loads((folder / VALUES_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: no readable state of a trainer ({error})") from error
    found = values.pop("format", None) if isinstance(values, dict) else None
    if found != _FORMAT:
        raise CheckpointError(f"{folder / VALUES_FILE}: format {found!r} is not {_FORMAT}, the one that is read here")
    return TrainerState(tensors=tensors, values=values)
