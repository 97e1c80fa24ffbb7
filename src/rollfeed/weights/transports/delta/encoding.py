"""Bytes of one tensor as the change from the last ones, near the entropy of that change.

A tensor is seen as unsigned integers of its elements' size, and a change as a difference modulo two to their bits: one
step of rounding is then 1 up or down in every floating point type, where an exclusive or has as many bits as carry.
Positions are gaps, cut into low bits that are as good as random and a rest that zstd codes by frequency; or a bitmap,
where many change. Signs are bits, and magnitudes above 1 are told apart by positions once more. A small step changes
nearly all small elements, by many units, and few large ones, so each kind is told apart where that is shorter.

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
_PART_BITS = 2000
"""That another part takes beside its positions."""
_COUNTED = 1 << 18
"""Elements of a tensor that are looked at for whether it is worth it."""
_WIDTHS = {"64": 8, "32": 4, "16": 2}
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder over bytes that are no record."""


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


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """Differences of some elements."""

    changed: Positions
    is_down: bytes
    larger: Positions
    """Among the changed ones: those whose difference is above 1 or below -1."""
    planes: list[Packed]
    """The rest of the larger ones' magnitudes."""


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """New bytes of a tensor: changes of all elements or of those below a bound and the others, or planes of all."""

    bound: int
    changes: list[Changes]
    planes: list[Packed]


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a type as safetensors calls it, 1 for those of less or of no known size."""
    return _WIDTHS.get(dtype.lstrip("BFIUC"), 1)


def encode(old: Bytes | None, new: Bytes, *, width: int) -> bytes:
    """Return the smallest encoding of ``new``, of ``old``'s length, beside what was there; without ``old`` all of it.

    Both are the bytes of all elements, little-endian, each of ``width`` bytes.
    """
    now, found = new.view(f"<u{width}"), []
    if old is None:
        return msgspec.msgpack.encode(Encoded(0, [], _planes(now)))
    was = old.view(f"<u{width}")
    is_changed_E = was != now
    bound = _best_bound(was, is_changed_E)
    parts = [(was[kind_E], now[kind_E]) for kind_E in _kinds(was, bound)] if bound else [(was, now)]
    found.append(msgspec.msgpack.encode(Encoded(bound, [_changes(*part) for part in parts], [])))
    if 2 * np.count_nonzero(is_changed_E) > len(now):
        found.append(msgspec.msgpack.encode(Encoded(0, [], _planes(now))))
    return min(found, key=len)


def decode(encoded: bytes, old: Bytes | None, *, num_bytes: int, width: int) -> Bytes:
    """Return the new bytes of a tensor.

    Raises:
        DamagedError: If that is no encoding of so many bytes, or needs the old ones where there are none.
    """
    try:
        told = msgspec.msgpack.decode(encoded, type=Encoded)
    except UNREADABLE as error:
        raise DamagedError(str(error)) from error
    if not told.changes:
        return _integers(told.planes, num_bytes // width, width).view(np.uint8)
    if old is None or len(old) != num_bytes or len(told.changes) != (2 if told.bound else 1):
        raise DamagedError("it is a change of other bytes")
    now = old.view(f"<u{width}").copy()
    if told.bound:
        for kind_E, changes in zip(_kinds(now, told.bound), told.changes, strict=True):
            now[kind_E] = _changed(changes, now[kind_E])
    else:
        now = _changed(told.changes[0], now)
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


def _classes(integers: Integers) -> Bytes:
    """Return the 8 bits behind the sign, the exponents of bf16 and fp32; of single bytes all that there are."""
    bits = 8 * integers.itemsize
    classes: Bytes = (integers >> integers.dtype.type(max(0, bits - 9))).astype(np.uint8)
    return classes & np.uint8(255 if bits > 8 else 127)


def _kinds(integers: Integers, bound: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    is_small_E = _classes(integers) < bound
    return is_small_E, ~is_small_E


def _best_bound(was: Integers, is_changed_E: NDArray[np.bool_]) -> int:
    """Return below which class elements are best told by themselves; 0 where that saves nothing."""
    step = 1 + len(was) // _COUNTED
    class_E = _classes(was[::step])
    of = np.cumsum([np.bincount(each, minlength=256) for each in (class_E, class_E[is_changed_E[::step]])], axis=1)
    (num, total), (changed, total_changed) = ((each, each[-1]) for each in of)
    bits = _position_bits(changed, num) + _position_bits(total_changed - changed, total - num)
    best = int(np.argmin(bits))
    return best + 1 if bits[best] + _PART_BITS / step < _position_bits(total_changed, total) else 0


def _position_bits(changed: NDArray[np.int64], num: NDArray[np.int64]) -> NDArray[np.float64]:
    shares = np.stack([changed, num - changed]) / np.maximum(num, 1)
    bits: NDArray[np.float64] = -num * (shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=0)
    return bits


def _changes(was: Integers, now: Integers) -> Changes:
    at_K, one = np.flatnonzero(was != now), was.dtype.type(1)
    difference_K = now[at_K] - was[at_K]
    is_down_K = difference_K >> was.dtype.type(8 * was.itemsize - 1) != 0
    magnitude_K = np.where(is_down_K, ~difference_K, difference_K - one)
    at_larger = np.flatnonzero(magnitude_K)
    return Changes(
        _positions(at_K, len(now)),
        np.packbits(is_down_K).tobytes(),
        _positions(at_larger, len(at_K)),
        _planes(magnitude_K[at_larger] - one),
    )


def _changed(told: Changes, now: Integers) -> Integers:
    """Return the integers after changes; they are changed in their place."""
    one = now.dtype.type(1)
    at_K = _elements(told.changed, len(now))
    at_larger = _elements(told.larger, len(at_K))
    magnitude_K = np.zeros(len(at_K), now.dtype)
    magnitude_K[at_larger] = _integers(told.planes, len(at_larger), now.itemsize) + one
    now[at_K] += np.where(_bits(told.is_down, len(at_K)), ~magnitude_K, magnitude_K + one)
    return now


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
