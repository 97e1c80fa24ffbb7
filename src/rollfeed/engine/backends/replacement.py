"""New weights: read from checkpoints, checked against a model's, and copied into it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollfeed.errors import CheckpointError, EngineProtocolError, in_one_line
from rollfeed.model_files import read_headers, read_stored, weight_files

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that weights may come in, by the names of safetensors."""


class HalfWrittenError(Exception):
    """Some weights are new and some are old: nothing can be computed any more."""


@contextmanager
def writing() -> Iterator[None]:
    """Write weights that have been checked in the block. Raises HalfWrittenError if it fails all the same."""
    try:
        yield
    except Exception as error:
        raise HalfWrittenError(f"new weights could not be written wholly: {in_one_line(error)}") from error


def replace_in_place(targets: Mapping[str, Tensor], tensors: Mapping[str, Any], *, complete: bool = False) -> None:
    """Copy ``tensors`` over the targets of the same name and of one type, after :func:`check_replacement`."""
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    ties = {name: target.data_ptr() for name, target in targets.items()}
    dtype = next(iter(targets.values())).dtype
    chosen = check_replacement(shapes, ties, tensors, complete=complete, dtype=dtype)
    with writing(), torch.no_grad():
        for name in chosen:
            targets[name].copy_(as_tensor(name, tensors[name]))


def load_known(load: Callable[..., None], tensors: Mapping[str, Any], *, unknown: Collection[str]) -> None:
    """Have ``load`` replace weights by ``tensors`` without those of ``unknown`` names.

    With such names all of the model's weights must be there: a name that is unknown may be what one of its own has
    become.
    """
    if not unknown:
        load(tensors)
        return
    try:
        load({name: tensor for name, tensor in tensors.items() if name not in unknown}, complete=True)
    except EngineProtocolError as error:
        raise EngineProtocolError(f"{error}; the model has no weight of the name {min(unknown)!r}") from None


def check_replacement(
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, Hashable],
    tensors: Mapping[str, Any],
    *,
    complete: bool,
    dtype: torch.dtype,
    whole_numbers: Container[str] = (),
) -> list[str]:
    """Check new weights, and return the names to be copied: one of those that are tied.

    Args:
        shapes: Of the model's weights, by name.
        ties: A value for each name, the same one where names stand for one weight.
        tensors: numpy or torch tensors by name.
        complete: Whether every weight must be among them.
        dtype: What they are held in.
        whole_numbers: Names of weights whose values are whole numbers, in tables for example.

    Raises:
        EngineProtocolError: If a name is unknown or missing, a shape or a kind of numbers differs, a value is not
            finite in ``dtype``, or names of one weight bring different values.
    """
    chosen: dict[Hashable, str] = {}
    for name, value in tensors.items():
        if name not in shapes:
            raise EngineProtocolError(f"weight {name!r}: the model has no weight of this name")
        source = _checked(name, value, shapes[name], None if name in whole_numbers else dtype)
        tied = chosen.setdefault(ties[name], name)
        if tied != name and not torch.equal(source, as_tensor(tied, tensors[tied])):
            raise EngineProtocolError(f"weights {tied!r} and {name!r} are tied in the model, but differ")
    if complete:
        missing = sorted(name for name in shapes if ties[name] not in chosen)
        if missing:
            raise EngineProtocolError(f"weight {missing[0]!r} is missing ({len(missing)} are)")
    return list(chosen.values())


def _checked(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """Return a weight that can be held in ``dtype``, None of which stands for whole numbers."""
    source = as_tensor(name, value)
    if tuple(source.shape) != shape:
        raise EngineProtocolError(f"weight {name!r}: its shape is {tuple(source.shape)}, the model's {shape}")
    if dtype is None and (source.is_floating_point() or source.is_complex()):
        raise EngineProtocolError(f"weight {name!r}: its values are {source.dtype}, not whole numbers")
    if dtype is not None and source.dtype not in _TYPES.values():
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _TYPES.values())
        raise EngineProtocolError(f"weight {name!r}: its values are {source.dtype}, not floating point ({kinds})")
    if dtype is not None and not bool(torch.isfinite(source.to(dtype)).all()):
        raise EngineProtocolError(f"weight {name!r}: some of its values are not finite as {dtype}")
    return source


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a numpy or torch tensor as torch's, without a copy where that is possible.

    Raises:
        EngineProtocolError: If it is neither.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        # torch warns of read-only arrays, and takes no foreign byte order.
        usable = value.flags.writeable and value.dtype.isnative
        return torch.from_numpy(value if usable else value.astype(value.dtype.newbyteorder("=")))
    raise EngineProtocolError(f"weight {name!r}: neither a torch tensor nor a numpy array of numbers")


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a model folder, each read when it is asked for.

    ``names`` are those that are wanted; None is all.
    """

    def __init__(self, folder: Path, names: Container[str] | None = None) -> None:
        files = [_MappedFile(file) for file in weight_files(folder)]
        self._file_of = {name: file for file in files for name in file.tensors if names is None or name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


class _MappedFile:
    """A file of weights in memory that the system reads as it is looked at.

    The library of the format checks the file, but its tensors are made here: with each that it makes for torch,
    release 0.8.0 loses two integers, 17 kB with every update of a model of 135 million parameters.
    """

    def __init__(self, file: Path) -> None:
        self._reader: Any = safe_open(file, framework="pt")
        self._bytes = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        self.tensors = read_stored(file)

    def read(self, name: str) -> Tensor:
        tensor: Tensor
        header, start, end = self.tensors[name]
        dtype = _TYPES.get(header.dtype)
        if dtype is None or start % dtype.itemsize:
            tensor = self._reader.get_tensor(name)
        else:
            tensor = self._bytes[start:end].view(dtype).view(header.shape)
        return tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder; all files have been opened, and may go away, when this returns.

    Raises:
        EngineProtocolError: If one cannot be read.
    """
    try:
        read_headers(folder)
        return dict(CheckpointTensors(folder))
    except (CheckpointError, SafetensorError, OSError) as error:
        reason = str(error).removeprefix(f"{folder}: ")
        raise EngineProtocolError(f"weights cannot be read from {folder}: {reason}") from error
