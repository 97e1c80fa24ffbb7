"""New weights: read from checkpoints, checked against a model's, and copied into it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollfeed.engine.checkpoint import weight_files
from rollfeed.errors import CheckpointError, EngineProtocolError


def replace_in_place(targets: Mapping[str, Tensor], tensors: Mapping[str, Any], *, complete: bool = False) -> None:
    """Copy ``tensors`` over the targets of the same name, after checking every one of them.

    Raises:
        EngineProtocolError: If a name is unknown or missing, a shape differs, a value is not finite,
            or two names of one tied target bring different values. Nothing has been changed then.
    """
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    ties = {name: target.data_ptr() for name, target in targets.items()}
    with torch.no_grad():
        for name in check_replacement(shapes, ties, tensors, complete=complete):
            targets[name].copy_(as_tensor(name, tensors[name]))


def check_replacement(
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, Hashable],
    tensors: Mapping[str, Any],
    *,
    complete: bool,
) -> list[str]:
    """Check new weights, and return the names to be copied: one of those that are tied.

    Args:
        shapes: Of the model's weights, by name.
        ties: A value for each name, the same one where names stand for one weight.
        tensors: numpy or torch tensors by name.
        complete: Whether every weight must be among them.

    Raises:
        EngineProtocolError: See :func:`replace_in_place`.
    """
    chosen: dict[Hashable, str] = {}
    for name, value in tensors.items():
        if name not in shapes:
            raise EngineProtocolError(f"weight {name!r}: the model has no weight of this name")
        source = _checked(name, value, shapes[name])
        tied = chosen.setdefault(ties[name], name)
        if tied != name and not torch.equal(source, as_tensor(tied, tensors[tied])):
            raise EngineProtocolError(f"weights {tied!r} and {name!r} are tied in the model, but differ")
    if complete:
        missing = sorted(name for name in shapes if ties[name] not in chosen)
        if missing:
            raise EngineProtocolError(f"weight {missing[0]!r} is missing ({len(missing)} are)")
    return list(chosen.values())


def _checked(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    source = as_tensor(name, value)
    if tuple(source.shape) != shape:
        raise EngineProtocolError(f"weight {name!r}: its shape is {tuple(source.shape)}, the model's {shape}")
    if not source.is_floating_point():
        raise EngineProtocolError(f"weight {name!r}: its values are {source.dtype}, not floating point")
    if not bool(torch.isfinite(source).all()):
        raise EngineProtocolError(f"weight {name!r}: some of its values are not finite")
    return source


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a numpy or torch tensor as torch's, without a copy where that is possible.

    Raises:
        EngineProtocolError: If it is neither.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        # torch warns of read-only arrays, and takes no foreign byte order.
        usable = value.flags.writeable and value.dtype.isnative
        return torch.from_numpy(value if usable else value.astype(value.dtype.newbyteorder("=")))
    raise EngineProtocolError(f"weight {name!r}: neither a torch tensor nor a numpy array of floating point numbers")


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of safetensors files, each read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        readers: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._reader_of = {
            name: reader
            for reader in readers
            for name in reader.keys()  # noqa: SIM118 - the reader is no mapping
            # Older checkpoints carry a buffer that follows from the configuration.
            if not name.endswith("rotary_emb.inv_freq")
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._reader_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader_of)

    def __len__(self) -> int:
        return len(self._reader_of)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder; all files have been opened, and may go away, when this returns.

    Raises:
        EngineProtocolError: If one cannot be read.
    """
    try:
        return dict(CheckpointTensors(weight_files(folder)))
    except (CheckpointError, SafetensorError, OSError) as error:
        raise EngineProtocolError(f"weights cannot be read from {folder}: {error}") from error
