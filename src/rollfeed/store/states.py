"""The state that each step leaves for the next one: a file a step, so that a run can go back to any of them.

A file holds the draws, the groups and the long texts of the prompt source's state that no earlier file of the run
holds, compressed; then an index that names all of the state's, those in earlier files included; then the index's size.
So what stays the same for many steps is written once, and a state needs no files but its own and earlier ones. Of
groups in flight that is each answered member, as thousands of groups are in flight for many steps, and of those only a
few have a further member at each. What is still the same object as at the step before is not even encoded.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa

from rollfeed.base.atomic import replace_file
from rollfeed.errors import RunDirectoryError
from rollfeed.store.codec import decode, encode
from rollfeed.store.journal import StepEntry
from rollfeed.store.json_text import to_json
from rollfeed.store.layout import STATES, step_file
from rollfeed.types import Group, Rollout, RunState

_TRAILER_BYTES = 8
_DIGEST_BYTES = 16
_LONG_CHARS = 4096
_DEEPEST = 16  # within a source's state that texts are looked for
_ZSTD = pa.Codec("zstd", compression_level=1)


class _Piece(msgspec.Struct, array_like=True, frozen=True):
    step: int
    """Whose file has it."""
    offset: int
    stored_bytes: int
    num_bytes: int
    digest: bytes


class _Text(msgspec.Struct, array_like=True, frozen=True):
    path: list[str | int]
    """Keys and places that lead to it."""
    piece: _Piece
    """As JSON."""


class _Member(msgspec.Struct, array_like=True, frozen=True):
    group: int
    """Its place among those in flight."""
    member: int
    piece: _Piece


class _Index(msgspec.Struct, array_like=True, frozen=True):
    state: bytes
    """Without the draws, groups and texts."""
    requeued: list[_Piece]
    surplus: list[_Piece]
    in_flight: list[_Piece]
    texts: list[_Text] = []
    """Long ones of the source's state."""
    members: list[_Member] = []
    """What has been sampled in the groups in flight; in the groups themselves these members are empty."""

    @property
    def pieces(self) -> list[_Piece]:
        others = [each.piece for each in (*self.texts, *self.members)]
        return [*self.requeued, *self.surplus, *self.in_flight, *others]


class StateFiles:
    """The state files of a run, written by one process at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[bytes, _Piece] = {}
        """What the newest state names, by digest."""
        self._texts: dict[str, _Piece] = {}
        """Its long texts, so that one which stays is not encoded and digested each time."""
        self._records: dict[int, tuple[Group | Rollout, _Piece]] = {}
        """Its surplus and members likewise, by identity: none is ever changed. Requeued groups may be on the disk."""
        self._empty: dict[int, tuple[Group, _Piece]] = {}
        """Its groups in flight without what their members have, by index."""

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
        texts: dict[str, _Piece] = {}
        records: dict[int, tuple[Group | Rollout, _Piece]] = {}
        empty: dict[int, tuple[Group, _Piece]] = {}
        written = (0, 0)

        def write(file: IO[bytes]) -> None:
            nonlocal written

            def piece_of(encoded: bytes) -> _Piece:
                digest = _digest(encoded)
                piece = named.get(digest) or known.get(digest)
                if piece is None:
                    stored = _ZSTD.compress(encoded, asbytes=True)
                    piece = _Piece(step, file.tell(), len(stored), len(encoded), digest)
                    file.write(stored)
                named[digest] = piece
                return piece

            def piece_of_text(text: str) -> _Piece:
                piece = self._texts.get(text)
                if piece is None or piece.step >= step:
                    piece = piece_of(to_json(text, "a text").encode())
                texts[text] = named[piece.digest] = piece
                return piece

            def piece_of_record(record: Group | Rollout) -> _Piece:
                _, piece = self._records.get(id(record), (None, None))
                if piece is None or piece.step >= step:
                    piece = piece_of(encode(record))
                records[id(record)], named[piece.digest] = (record, piece), piece
                return piece

            def piece_of_empty(group: Group) -> _Piece:
                before, piece = self._empty.get(group.group_index, (None, None))
                if before is None or piece is None or piece.step >= step or not _is_alike(before, group):
                    before = _emptied(group)
                    piece = piece_of(encode(before))
                empty[group.group_index], named[piece.digest] = (before, piece), piece
                return piece

            found: dict[tuple[str | int, ...], str] = {}
            source = _without_long_texts(state.source, (), found.__setitem__)
            index = msgspec.msgpack.encode(
                _Index(
                    state=encode(replace(state, source=source, requeued=(), surplus=(), in_flight=())),
                    requeued=[piece_of(encode(group)) for group in state.requeued],
                    surplus=[piece_of_record(group) for group in state.surplus],
                    in_flight=[piece_of_empty(group) for group in state.in_flight],
                    texts=[_Text(list(path), piece_of_text(text)) for path, text in found.items()],
                    members=[
                        _Member(place, member, piece_of_record(rollout))
                        for place, group in enumerate(state.in_flight)
                        for member, rollout in enumerate(group.rollouts)
                        if _has_something(rollout)
                    ],
                )
            )
            file.write(index)
            file.write(len(index).to_bytes(_TRAILER_BYTES, "little"))
            written = file.tell(), zlib.crc32(index)

        replace_file(step_file(self._directory, STATES, step), write)
        self._known, self._texts, self._records, self._empty = named, texts, records, empty
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
                requeued=self._read_groups(index.requeued),
                surplus=self._read_groups(index.surplus),
                in_flight=self._read_in_flight(index),
            )
            for text in index.texts:
                place: Any = state.source
                for key in text.path[:-1]:
                    place = place[key]
                place[text.path[-1]] = json.loads(self._read_piece(text.piece))
        except (OSError, ValueError, IndexError, MemoryError, msgspec.MsgspecError) as error:
            raise _unreadable(path, error) from error
        self._known, self._texts = {piece.digest: piece for piece in index.pieces}, {}
        self._records, self._empty = {}, {}
        return state

    def _read_groups(self, pieces: Sequence[_Piece]) -> tuple[Group, ...]:
        return tuple(decode(Group, self._read_piece(piece)) for piece in pieces)

    def _read_in_flight(self, index: _Index) -> tuple[Group, ...]:
        groups = list(self._read_groups(index.in_flight))
        rollouts = [list(group.rollouts) for group in groups]
        for each in index.members:
            rollouts[each.group][each.member] = decode(Rollout, self._read_piece(each.piece))
        return tuple(replace(group, rollouts=tuple(have)) for group, have in zip(groups, rollouts, strict=True))

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


def _has_something(rollout: Rollout) -> bool:
    return bool(rollout.samples) or rollout.error is not None


def _emptied(group: Group) -> Group:
    """Return a group whose members have nothing."""
    return replace(group, rollouts=tuple(Rollout(rollout_id=each.rollout_id, samples=()) for each in group.rollouts))


def _is_alike(emptied: Group, group: Group) -> bool:
    """Whether a group is the same as at an earlier step, but for what its members have."""
    return emptied.prompt is group.prompt and len(emptied.rollouts) == len(group.rollouts)


def _without_long_texts(
    value: Any, path: tuple[str | int, ...], take: Callable[[tuple[str | int, ...], str], None]
) -> Any:
    """Return JSON values with nothing in place of long texts, which ``take`` gets with where they are."""
    if isinstance(value, str) and len(value) > _LONG_CHARS:
        take(path, value)
        return None
    if len(path) == _DEEPEST:
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):  # JSON makes texts of other keys
        return {key: _without_long_texts(each, (*path, key), take) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_long_texts(each, (*path, place), take) for place, each in enumerate(value)]
    return value


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
