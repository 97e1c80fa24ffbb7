"""The state that each step leaves for the next one: a file a step, so that a run can go back to any of them.

A file holds the draws and groups that no earlier file of the run holds, compressed; then an index that
names all of the state's, those in earlier files included; then the index's size. So a group that waits
for many steps is written once, and a state needs no files but its own and earlier ones.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import msgspec
import pyarrow as pa

from rollfeed.base.atomic import replace_file
from rollfeed.errors import RunDirectoryError
from rollfeed.store.codec import decode, encode
from rollfeed.store.journal import StepEntry
from rollfeed.store.layout import STATES, step_file
from rollfeed.types import Group, RunState

_TRAILER_BYTES = 8
_DIGEST_BYTES = 16
_ZSTD = pa.Codec("zstd", compression_level=1)


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

    def write(self, step: int, state: RunState) -> tuple[int, int]:
        """Put the state that a step leaves on disk; it counts when its journal entry is there.

        Returns:
            The file's size, and the checksum of its index, which has digests of all that it names.

        Raises:
            RunFailedError: If a label, metadata or message is not JSON.
            OSError: If the disk refuses.
        """
        known = {digest: piece for digest, piece in self._known.items() if piece.step < step}
        named: dict[bytes, _Piece] = {}
        written = (0, 0)

        def write(file: IO[bytes]) -> None:
            nonlocal written

            def piece_of(record: Group) -> _Piece:
                encoded = encode(record)
                digest = _digest(encoded)
                piece = named.get(digest) or known.get(digest)
                if piece is None:
                    stored = _ZSTD.compress(encoded, asbytes=True)
                    piece = _Piece(step, file.tell(), len(stored), len(encoded), digest)
                    file.write(stored)
                named[digest] = piece
                return piece

            index = msgspec.msgpack.encode(
                _Index(
                    state=encode(replace(state, requeued=(), surplus=(), in_flight=())),
                    requeued=list(map(piece_of, state.requeued)),
                    surplus=list(map(piece_of, state.surplus)),
                    in_flight=list(map(piece_of, state.in_flight)),
                )
            )
            file.write(index)
            file.write(len(index).to_bytes(_TRAILER_BYTES, "little"))
            written = file.tell(), zlib.crc32(index)

        replace_file(step_file(self._directory, STATES, step), write)
        self._known = named
        return written

    def read(self, entry: StepEntry) -> RunState:
        """Return the state that a committed step left; the next :meth:`write` adds to it.

        Raises:
            RunDirectoryError: If its file, or one that it refers to, is missing or damaged.
        """
        path = step_file(self._directory, STATES, entry.step)
        try:
            index = _read_index(path, entry)
            state = replace(
                decode(RunState, index.state),
                requeued=self._read_pieces(index.requeued),
                surplus=self._read_pieces(index.surplus),
                in_flight=self._read_pieces(index.in_flight),
            )
        except (OSError, ValueError, MemoryError, msgspec.MsgspecError) as error:
            raise _unreadable(path, error) from error
        self._known = {piece.digest: piece for piece in (*index.requeued, *index.surplus, *index.in_flight)}
        return state

    def _read_pieces(self, pieces: Sequence[_Piece]) -> tuple[Group, ...]:
        return tuple(decode(Group, self._read_piece(piece)) for piece in pieces)

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


def _read_index(path: Path, entry: StepEntry) -> _Index:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size != entry.state_size:
            raise ValueError(f"it has {size} bytes, not {entry.state_size}")
        file.seek(size - _TRAILER_BYTES)
        index_bytes = int.from_bytes(file.read(), "little")
        if index_bytes > size - _TRAILER_BYTES:
            raise ValueError("the index has a wrong size")
        file.seek(size - _TRAILER_BYTES - index_bytes)
        encoded = file.read(index_bytes)
    if zlib.crc32(encoded) != entry.state_checksum:
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
