"""Bytes of one tensor as the change from the last ones, near the entropy of that change.

A tensor is seen as unsigned integers of its elements' size, and a change as a difference modulo two to their bits: one
step of rounding is then 1 up or down in every floating point type, where an exclusive or has as many bits as carry.
Positions are gaps, cut into low bits that are as good as random and a rest that zstd codes by frequency; or a bitmap,
where many change. Signs are bits, and magnitudes above 1 are told apart by positions once more.

Axes: E elements of a tensor, K of them changed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Integers: TypeAlias = NDArray[Any]
"""Unsigned, of an element's size."""

_ESCAPE = 255
_MEAN_GAP = 32
"""Gaps above this in the mean give low bits away, so that what is left has about this mean and fits a byte."""
_MOST_LOW_BITS = 40
_WIDTHS = {"64": 8, "32": 4, "16": 2}


class DamagedError(ValueError):
    """Bytes that are no change of what they should change."""


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """Bytes, compressed where that makes them smaller."""

    size: int
    content: bytes


class Positions(msgspec.Struct, frozen=True, array_like=True):
    """Ascending positions: a bitmap of all elements where a fourth of them is meant, else gaps."""

    count: int
    num_low: int = 0
    low: bytes = b""
    """``(num_low, K)`` bits."""
    rest: Packed = Packed(0, b"")
    """The rest of each gap as a byte, behind a 255 for every 255 in it."""


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """New bytes of a tensor: planes of all integers, or with ``changed`` the magnitudes above 2 of the differences."""

    planes: list[Packed]
    changed: Positions | None = None
    is_down: bytes = b""
    larger: Positions | None = None


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a type as safetensors calls it, 1 for those of less or of no known size."""
    return _WIDTHS.get(dtype.lstrip("BFIUC"), 1)


def encode(old: Bytes | None, new: Bytes, *, width: int) -> bytes:
    """Return the smallest encoding of ``new``, of ``old``'s length, beside what was there; without ``old`` all of it.

    Args:
        old: What the reader has, or None.
        new: The bytes of all elements, little-endian.
        width: Bytes of an element.
    """
    now, found = new.view(f"<u{width}"), []
    if old is not None:
        was = old.view(f"<u{width}")
        at_K = np.flatnonzero(was != now)
        found.append(msgspec.msgpack.encode(_changes(was, now, at_K)))
    if old is None or 2 * len(at_K) > len(now):
        found.append(msgspec.msgpack.encode(Encoded(_planes(now))))
    return min(found, key=len)


def decode(encoded: bytes, old: Bytes | None, *, num_bytes: int, width: int) -> Bytes:
    """Return the new bytes of a tensor.

    Raises:
        DamagedError: If that is no encoding of so many bytes, or needs the old ones where there are none.
    """
    try:
        told = msgspec.msgpack.decode(encoded, type=Encoded)
    except msgspec.MsgspecError as error:
        raise DamagedError(str(error)) from error
    if told.changed is None or told.larger is None:
        return _integers(told.planes, num_bytes // width, width).view(np.uint8)
    if old is None or len(old) != num_bytes:
        raise DamagedError("it is a change of other bytes")
    now = old.view(f"<u{width}").copy()
    one = now.dtype.type(1)
    at_K = _elements(told.changed, len(now))
    at_larger = _elements(told.larger, len(at_K))
    magnitude_K = np.zeros(len(at_K), now.dtype)
    magnitude_K[at_larger] = _integers(told.planes, len(at_larger), width) + one
    now[at_K] += np.where(_bits(told.is_down, len(at_K)), ~magnitude_K, magnitude_K + one)
    changed: Bytes = now.view(np.uint8)
    return changed


def zipped(content: bytes | Bytes) -> bytes:
    """Return bytes compressed; the level looks for no short repetitions, which random bytes have by chance only."""
    packed: bytes = _zstd().compress(content, asbytes=True)
    return packed


def unzipped(packed: bytes, size: int) -> bytes:
    """Return the bytes that were compressed.

    Raises:
        DamagedError: If they are not so many.
    """
    try:
        content: bytes = _zstd().decompress(packed, size, asbytes=True)
    except OSError as error:  # as pyarrow calls all that goes wrong in it
        raise DamagedError(str(error)) from error
    return content


def _changes(was: Integers, now: Integers, at_K: NDArray[np.intp]) -> Encoded:
    difference_K, one = now[at_K] - was[at_K], was.dtype.type(1)
    is_down_K = difference_K >> was.dtype.type(8 * was.itemsize - 1) != 0
    magnitude_K = np.where(is_down_K, ~difference_K, difference_K - one)
    at_larger = np.flatnonzero(magnitude_K)
    return Encoded(
        _planes(magnitude_K[at_larger] - one),
        _positions(at_K, len(now)),
        np.packbits(is_down_K).tobytes(),
        _positions(at_larger, len(at_K)),
    )


def _planes(integers: Integers) -> list[Packed]:
    """Return the first bytes of all integers, then the second ones, and so on."""
    planes = integers.view(np.uint8).reshape(-1, integers.itemsize).T
    return [_packed(np.ascontiguousarray(plane)) for plane in planes]


def _integers(planes: list[Packed], size: int, width: int) -> Integers:
    if [plane.size for plane in planes] != [size] * width:
        raise DamagedError("it is not as long as the tensor")
    integers: Integers = np.stack([_unpacked(plane) for plane in planes], axis=1).reshape(-1).view(f"<u{width}")
    return integers


def _positions(at_K: NDArray[np.intp], size: int) -> Positions:
    if 4 * len(at_K) > size:
        is_set = np.zeros(size, np.bool_)
        is_set[at_K] = True
        return Positions(len(at_K), rest=_packed(np.packbits(is_set)))
    if not len(at_K):
        return Positions(0)
    gap_K = np.diff(at_K, prepend=-1) - 1
    num_low = int(np.log2(max(1.0, float(gap_K.mean()) / _MEAN_GAP)))
    num_escapes_K, last_K = np.divmod(gap_K >> num_low, _ESCAPE)
    ends_K = np.cumsum(num_escapes_K + 1)
    escaped = np.full(int(ends_K[-1]), _ESCAPE, np.uint8)
    escaped[ends_K - 1] = last_K
    low = np.array([gap_K >> bit & 1 for bit in range(num_low)], np.bool_)
    return Positions(len(at_K), num_low, np.packbits(low).tobytes(), _packed(escaped))


def _elements(told: Positions, size: int) -> NDArray[np.intp]:
    if 4 * told.count > size:
        at_K = np.flatnonzero(_bits(_unpacked(told.rest), size))
    elif not told.count:
        return np.zeros(0, np.intp)
    else:
        if told.num_low > _MOST_LOW_BITS or told.rest.size > size + told.count:
            raise DamagedError("it has positions behind the tensor's end")
        escaped = _unpacked(told.rest)
        ends = np.flatnonzero(escaped != _ESCAPE)
        gap_K = (np.diff(ends, prepend=-1) - 1) * _ESCAPE + escaped[ends] << told.num_low
        low = _bits(told.low, told.num_low * told.count).reshape(told.num_low, told.count)
        for bit, is_set_K in enumerate(low if len(gap_K) == told.count else ()):
            gap_K |= is_set_K.astype(np.intp) << bit
        at_K = np.cumsum(gap_K + 1) - 1
    if len(at_K) != told.count or at_K[-1] >= size:
        raise DamagedError("its positions are not the tensor's")
    return at_K


def _bits(packed: bytes | Bytes, size: int) -> NDArray[np.bool_]:
    if len(packed) != (size + 7) // 8:
        raise DamagedError("bits are missing")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=size).astype(np.bool_)


def _packed(content: Bytes) -> Packed:
    packed = zipped(content) if len(content) else b""
    return Packed(len(content), packed if len(packed) < len(content) else content.tobytes())


def _unpacked(packed: Packed) -> Bytes:
    is_raw = len(packed.content) == packed.size
    return np.frombuffer(packed.content if is_raw else unzipped(packed.content, packed.size), np.uint8)


@cache
def _zstd() -> Any:
    import pyarrow  # here, because most that imports this package publishes no changes

    return pyarrow.Codec("zstd", compression_level=1)
