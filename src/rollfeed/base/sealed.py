"""Entries of a file that is appended to: each is there whole or not at all, also after a kill."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_HEADER_BYTES = 8


def sealed(content: bytes) -> bytes:
    """Return what is appended for an entry."""
    return len(content).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little") + content


def unsealed(content: bytes) -> Iterator[bytes]:
    """Yield the entries of a file; what a killed process has not finished ends it, or zeros that a disk left."""
    start = 0
    while start + _HEADER_BYTES <= len(content):
        size, checksum = (int.from_bytes(content[at : at + 4], "little") for at in (start, start + 4))
        entry = content[start + _HEADER_BYTES : start + _HEADER_BYTES + size]
        if not size or len(entry) < size or zlib.crc32(entry) != checksum:
            return
        yield entry
        start += _HEADER_BYTES + size


def size_unsealed(content: bytes) -> int:
    """Return how many bytes of a file are whole entries, from its beginning on."""
    return sum(_HEADER_BYTES + len(entry) for entry in unsealed(content))


def array_as_bytes(value: Any) -> bytes:
    """Return an array as msgpack stores it (``enc_hook``)."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def array_of_bytes(kind: Any, encoded: bytes) -> Any:
    """Return the array that a field of this type was (``dec_hook``)."""
    return np.frombuffer(encoded, np.int32 if "int32" in str(kind) else np.float32).copy()
