"""Tensors side by side in one block of bytes, and its form on the wire, which is SGLang's ``flattened_bucket``.

A tensor begins at a multiple of its item size, or it could not be looked at in place: large items come first.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE_ARGUMENT = 6
"""Of ``rebuild_cuda_tensor``; the same in every version of PyTorch that SGLang and vLLM run on."""
_TAKEN = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("types", "SimpleNamespace"),
}
"""Globals that a text may name, beside the types of tensors: none of them runs anything that is in it."""


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Some tensors of an update. Axis: B bytes of all of them."""

    bytes_B: Tensor
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor, which follow each other without a gap."""
        return [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def dtype_names(self) -> list[str]:
        """Types as PyTorch calls them, such as ``bfloat16``."""
        return [str(dtype).removeprefix("torch.") for dtype in self.dtypes]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, in the bucket's own memory."""
        parts = torch.split(self.bytes_B, self.sizes)
        return {
            name: part.view(dtype).reshape(shape)
            for name, part, dtype, shape in zip(self.names, parts, self.dtypes, self.shapes, strict=True)
        }


def make_buckets(tensors: Iterable[tuple[str, Tensor]], *, most_bytes: int) -> Iterator[TensorBucket]:
    """Yield copies of tensors in buckets, on the device of the first one.

    A bucket ends with the tensor that takes it above ``most_bytes``, which is where vLLM's receiver ends it, too.
    """
    waiting = sorted(tensors, key=lambda named: -named[1].element_size())
    waiting.reverse()  # taken from the end, so that what is copied can go
    device = waiting[-1][1].device if waiting else None
    while waiting:
        chosen: list[tuple[str, Tensor]] = []
        num_bytes = 0
        while waiting and num_bytes <= most_bytes:
            name, tensor = waiting.pop()
            chosen.append((name, tensor))
            num_bytes += tensor.nbytes
        yield TensorBucket(
            torch.cat([tensor.to(device).reshape(-1).view(torch.uint8) for _, tensor in chosen]),
            names=tuple(name for name, _ in chosen),
            shapes=tuple(tuple(tensor.shape) for _, tensor in chosen),
            dtypes=tuple(tensor.dtype for _, tensor in chosen),
        )


class _HandlePickler(ForkingPickler):
    """Pickles tensors of a GPU as handles to their memory, with the GPU by its own name.

    Another process may have another number for it.
    """

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, Tensor) and given.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(given)  # type: ignore[no-untyped-call]
            return rebuild, with_gpu_name(arguments, str(torch.cuda.get_device_properties(given.device).uuid))
        return NotImplemented


def with_gpu_name(arguments: tuple[Any, ...], gpu: str | int) -> tuple[Any, ...]:
    """Return what rebuilds a tensor of a GPU with that GPU called otherwise."""
    return (*arguments[:_DEVICE_ARGUMENT], gpu, *arguments[_DEVICE_ARGUMENT + 1 :])


def bucket_text(bucket: TensorBucket) -> str:
    """Return an entry of ``serialized_named_tensors``: base64 of a pickle.

    From a GPU it has a handle, for one reader on the same host, and the bucket must live until that has answered;
    else the bytes themselves.
    """
    entries, start = [], 0
    for name, shape, dtype, size in zip(bucket.names, bucket.shapes, bucket.dtypes, bucket.sizes, strict=True):
        entries.append(
            SimpleNamespace(
                name=name, shape=torch.Size(shape), dtype=dtype, start_idx=start, end_idx=start + size, numel=size
            )
        )
        start += size
    content = {"flattened_tensor": bucket.bytes_B, "metadata": entries}
    if not bucket.bytes_B.is_cuda:
        return base64.b64encode(pickle.dumps(content)).decode()
    written = io.BytesIO()
    _HandlePickler(written).dump(content)
    return base64.b64encode(written.getbuffer()).decode()


class _BucketUnpickler(pickle._Unpickler):
    """The one in Python, whose memo is a dict: the one in C makes room for the largest number that a text names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # which by itself would load anything
            return _load_storage
        found = super().find_class(module, name) if (module, name) in _TAKEN else getattr(torch, name, None)
        if (module, name) in _TAKEN or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no bucket needs")


def _load_storage(content: bytes) -> Any:
    storage = torch.load(io.BytesIO(content), weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage):
        raise pickle.UnpicklingError("what should be a tensor's memory is something else")
    return storage


def read_bucket(text: str) -> dict[str, Tensor]:
    """Return the tensors of :func:`bucket_text` by name; whatever the text is, nothing in it is run.

    Raises:
        ValueError: If it is no bucket with its bytes inside.
    """
    try:
        content = _BucketUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        bytes_B: Tensor = content["flattened_tensor"]
        return {entry.name: _part(bytes_B, entry) for entry in content["metadata"]}
    except Exception as error:  # unpickling may raise anything
        raise ValueError(f"no bucket of tensors: {' '.join(str(error).split())[:300]}") from None


def _part(bytes_B: Tensor, entry: Any) -> Tensor:
    if not (isinstance(entry.name, str) and 0 <= entry.start_idx <= entry.end_idx <= len(bytes_B)):
        raise ValueError("an entry of its metadata lies outside")
    return bytes_B[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)


def bucket_of(names: list[str], dtypes: list[str], shapes: list[list[int]], *, most_bytes: int) -> TensorBucket:
    """Return a bucket with room for tensors that are received, in the memory of this process.

    Raises:
        ValueError: If they are not described alike, one is of an unknown type, or they are larger than ``most_bytes``.
    """
    known: Mapping[str, Any] = vars(torch)
    found = [each for dtype in dtypes if isinstance(each := known.get(dtype), torch.dtype)]
    if not (len(names) == len(dtypes) == len(shapes) == len(found)):
        raise ValueError("names, dtypes and shapes must be as many, and types be PyTorch's")
    if not all(type(size) is int and size >= 0 for shape in shapes for size in shape):
        raise ValueError("shapes must be of whole numbers that are not negative")
    empty = TensorBucket(torch.empty(0), tuple(names), tuple(map(tuple, shapes)), tuple(found))
    if (num_bytes := sum(empty.sizes)) > most_bytes:
        raise ValueError(f"{num_bytes} bytes are more than the model has, {most_bytes}")
    return replace(empty, bytes_B=torch.empty(num_bytes, dtype=torch.uint8))
