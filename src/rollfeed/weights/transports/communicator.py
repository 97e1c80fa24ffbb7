"""NCCL by its C interface: communicators that are joined by NCCL's own unique id, as vLLM joins them.

PyTorch has a binding of its own, whose ``torch.cuda.nccl.init_rank`` fails with Python 3.10 and newer
("PY_SSIZE_T_CLEAN macro must be defined", seen with PyTorch 2.11). Signatures are those of ``nccl.h`` (2.x).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

import torch

_LIBRARY = "libnccl.so.2"
"""As PyTorch for CUDA has loaded it."""
_ID_BYTES = 128
_TYPES = {torch.uint8: 1, torch.float32: 7}
_SUM = 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class Communicator:
    """One rank of a group of GPUs; calls block, and a rank that is gone can hold them up.

    ``unique_id`` comes from :func:`unique_id` in one of the group's processes.

    Raises:
        RuntimeError: If there is no NCCL, or it fails.
    """

    def __init__(self, unique_id: bytes, *, num_ranks: int, rank: int, device: torch.device) -> None:
        if len(unique_id) != _ID_BYTES:
            raise RuntimeError(f"NCCL's unique ids have {_ID_BYTES} bytes, and this has {len(unique_id)}")
        self._device = device
        self._pointer = ctypes.c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            _call("ncclCommInitRank", ctypes.byref(self._pointer), ctypes.c_int(num_ranks), given, ctypes.c_int(rank))

    def broadcast(self, bytes_B: torch.Tensor) -> None:
        """Send the bytes of rank 0, or overwrite those of another rank with them."""
        self._collect("ncclBroadcast", bytes_B, ctypes.c_int(0))

    def try_out(self) -> None:
        """Add up one number of all ranks, as vLLM does with each new group; all have to."""
        self._collect("ncclAllReduce", torch.zeros(1, device=self._device), ctypes.c_int(_SUM))

    def leave(self) -> None:
        """Give the group up, whatever the others do."""
        pointer, self._pointer = self._pointer, ctypes.c_void_p()
        if pointer:
            with suppress(RuntimeError):
                _call("ncclCommAbort", pointer)

    def _collect(self, name: str, tensor: torch.Tensor, how: ctypes.c_int) -> None:
        if not self._pointer:
            raise RuntimeError("this rank has left its group")
        if not tensor.is_contiguous() or tensor.device != self._device:
            raise RuntimeError(f"a tensor on {tensor.device}: what is sent is on {self._device}, without gaps")
        place, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        kind = ctypes.c_int(_TYPES[tensor.dtype])
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            where = ctypes.c_void_p(stream.cuda_stream)
            _call(name, place, place, count, kind, how, self._pointer, where)
            stream.synchronize()


def unique_id() -> bytes:
    """Return the id of a new group.

    Raises:
        RuntimeError: If there is no NCCL.
    """
    made = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


def _call(name: str, *arguments: Any) -> None:
    if code := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name}: {_library().ncclGetErrorString(ctypes.c_int(code)).decode()}")


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise RuntimeError(f"{error}: install PyTorch for CUDA, which brings NCCL") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
