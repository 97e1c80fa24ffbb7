"""What each step leaves for the next one: a file a step, so that a run can go back to any of them.

A file holds the draws and groups that no earlier file of the run holds, compressed; then an index that
names all of the state's, those in earlier files included; then the index's size. So a group that waits
for many steps is written once, and a state needs no files but its own and earlier ones.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from rollfeed.base.atomic import replace_file
from rollfeed.errors import RunDirectoryError
from rollfeed.store.codec import (
    decode_draw,
    decode_group,
    decode_state,
    encode_draw,
    encode_group,
    encode_state,
)
from rollfeed.store.layout import STATES, step_file
from rollfeed.types import RunState

_TRAILER_BYTES = 8
_DIGEST_BYTES = 16
_ZSTD = pa.Codec("zstd", compression_level=1)

_Record = TypeVar("_Record")


class StateEntry(NamedTuple):
    """What the journal says of a state file."""

    size: int
    checksum: int
    """Of the index, which has digests of all that it names."""


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    step: int
    """Whose file has it."""
    offset: int
    stored_bytes: int
    num_bytes: int
    digest: bytes


class _Index(msgspec.Struct, array_like=True, frozen=True):
    state: bytes
    """Without the draws and groups."""
    requeued: list[_Piece]
    surplus: list[_Piece]
    in_flight: list[_Piece]


class StateFiles:
    """The state files of a run, written by one process at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[bytes, _Piece] = {}
        """What the newest state names, by digest."""

    def write(self, step: int, state: RunState) -> StateEntry:
        """Put the state that a step leaves on disk; it counts when its entry is in the journal.

        Raises:
            RunFailedError: If a label, metadata or message is not JSON.
            OSError: If the disk refuses.
        """
        writer = _Writer(step, {key: piece for key, piece in self._known.items() if piece.step < step})
        replace_file(step_file(self._directory, STATES, step), partial(writer.write, state))
        self._known = writer.named
        return writer.entry

    def read(self, step: int, entry: StateEntry) -> RunState:
        """Return the state that a step left; the next :meth:`write` adds to it.

        Raises:
            RunDirectoryError: If its file, or one that it refers to, is missing or damaged.
        """
        path = step_file(self._directory, STATES, step)
        try:
            index = _read_index(path, entry)
            state = decode_state(index.state)
            state = replace(
                state,
                requeued=self._read_pieces(index.requeued, decode_draw),
                surplus=self._read_pieces(index.surplus, decode_group),
                in_flight=self._read_pieces(index.in_flight, decode_draw),
            )
        except (OSError, ValueError, MemoryError, msgspec.MsgspecError) as error:
            raise _unreadable(path, error) from error
        self._known = {piece.digest: piece for piece in (*index.requeued, *index.surplus, *index.in_flight)}
        return state

    def _read_pieces(self, pieces: Sequence[_Piece], decode: Callable[[bytes], _Record]) -> tuple[_Record, ...]:
        return tuple(decode(self._read_piece(piece)) for piece in pieces)

    def _read_piece(self, piece: _Piece) -> bytes:
        path = step_file(self._directory, STATES, piece.step)
        try:
            with path.open("rb") as file:
                file.seek(piece.offset)
                stored = file.read(piece.stored_bytes)
            encoded = bytes(_ZSTD.decompress(stored, decompressed_size=piece.num_bytes, asbytes=True))
        except (OSError, ValueError, MemoryError) as error:
            raise _unreadable(path, error) from error
        if _digest(encoded) != piece.digest:
            raise _unreadable(path, ValueError(f"wrong checksum at byte {piece.offset}"))
        return encoded


class _Writer:
    """Writes one state file."""

    def __init__(self, step: int, known: dict[bytes, _Piece]) -> None:
        self.named: dict[bytes, _Piece] = {}
        self.entry = StateEntry(0, 0)
        self._step = step
        self._known = known

    def write(self, state: RunState, file: IO[bytes]) -> None:
        """Write what is new, then the index, then its size."""
        index = msgspec.msgpack.encode(
            _Index(
                state=encode_state(replace(state, requeued=(), surplus=(), in_flight=())),
                requeued=[self._piece(encode_draw(draw), file) for draw in state.requeued],
                surplus=[self._piece(encode_group(group), file) for group in state.surplus],
                in_flight=[self._piece(encode_draw(draw), file) for draw in state.in_flight],
            )
        )
        file.write(index)
        file.write(len(index).to_bytes(_TRAILER_BYTES, "little"))
        self.entry = StateEntry(file.tell(), zlib.crc32(index))

    def _piece(self, encoded: bytes, file: IO[bytes]) -> _Piece:
        digest = _digest(encoded)
        piece = self.named.get(digest) or self._known.get(digest)
        if piece is None:
            stored = _ZSTD.compress(encoded, asbytes=True)
            piece = _Piece(self._step, file.tell(), len(stored), len(encoded), digest)
            file.write(stored)
        self.named[digest] = piece
        return piece


def _read_index(path: Path, entry: StateEntry) -> _Index:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size != entry.size:
            raise ValueError(f"it has {size} bytes, not {entry.size}")
        file.seek(size - _TRAILER_BYTES)
        index_bytes = int.from_bytes(file.read(), "little")
        if index_bytes > size - _TRAILER_BYTES:
            raise ValueError("the index has a wrong size")
        file.seek(size - _TRAILER_BYTES - index_bytes)
        encoded = file.read(index_bytes)
    if zlib.crc32(encoded) != entry.checksum:
        raise ValueError("the index has a wrong checksum")
    return msgspec.msgpack.decode(encoded, type=_Index)


def _digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest()


def _unreadable(path: Path, error: Exception) -> RunDirectoryError:
    if isinstance(error, RunDirectoryError):
        return error
    if isinstance(error, FileNotFoundError):
        what = "is missing"
    elif isinstance(error, OSError) and error.strerror:  # zstd complains with an OSError of its own
        what = f"cannot be read: {error.strerror}"
    else:
        what = f"is damaged: {error}"
    return RunDirectoryError(
        f"{path}: {what}; restore the run directory from a copy, or go back to an earlier step: "
        f"rollfeed run --resume {path.parent.parent} --step N"
    )
