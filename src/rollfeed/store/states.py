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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa

from rollfeed.base.atomic import Digest, open_regular, replace_digested
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
        texts, members = (text.piece for text in self.texts), (member.piece for member in self.members)
        return [*self.requeued, *self.surplus, *self.in_flight, *texts, *members]


@dataclass(slots=True)
class _Named:
    """The pieces of a state, and what they are pieces of, so that what stays is neither encoded nor digested again."""

    pieces: dict[bytes, _Piece] = field(default_factory=dict)
    """By digest."""
    texts: dict[str, _Piece] = field(default_factory=dict)
    """Of the source's state."""
    records: dict[int, tuple[Group | Rollout, _Piece]] = field(default_factory=dict)
    """Surplus and members, by identity: none is ever changed. Not requeued groups, which may be on the disk."""
    empty: dict[int, tuple[Group, _Piece]] = field(default_factory=dict)
    """Groups in flight without what their members have, by index."""


class _Writing:
    """A state file that is being written, given what the state before names."""

    def __init__(self, step: int, file: IO[bytes], before: _Named) -> None:
        self.named = _Named()
        self._step = step
        self._file = file
        self._before = before

    def index_of(self, state: RunState) -> bytes:
        """Write all that no earlier file has, and return the index."""
        found: dict[tuple[str | int, ...], str] = {}
        source = _without_long_texts(state.source, (), found.__setitem__)
        return msgspec.msgpack.encode(
            _Index(
                state=encode(replace(state, source=source, requeued=(), surplus=(), in_flight=())),
                requeued=[self._piece(encode(group)) for group in state.requeued],
                surplus=[self._piece_of_record(group) for group in state.surplus],
                in_flight=[self._piece_of_empty(group) for group in state.in_flight],
                texts=[_Text(list(path), self._piece_of_text(text)) for path, text in found.items()],
                members=[
                    _Member(place, member, self._piece_of_record(rollout))
                    for place, group in enumerate(state.in_flight)
                    for member, rollout in enumerate(group.rollouts)
                    if _has_something(rollout)
                ],
            )
        )

    def _piece(self, encoded: bytes) -> _Piece:
        digest = _digest(encoded)
        piece = self.named.pieces.get(digest) or self._earlier(self._before.pieces.get(digest))
        if piece is None:
            stored = _ZSTD.compress(encoded, asbytes=True)
            piece = _Piece(self._step, self._file.tell(), len(stored), len(encoded), digest)
            self._file.write(stored)
        self.named.pieces[digest] = piece
        return piece

    def _piece_of_text(self, text: str) -> _Piece:
        piece = self._earlier(self._before.texts.get(text)) or self._piece(to_json(text, "a text").encode())
        self.named.texts[text] = self.named.pieces[piece.digest] = piece
        return piece

    def _piece_of_record(self, record: Group | Rollout) -> _Piece:
        _, known = self._before.records.get(id(record), (None, None))
        piece = self._earlier(known) or self._piece(encode(record))
        self.named.records[id(record)], self.named.pieces[piece.digest] = (record, piece), piece
        return piece

    def _piece_of_empty(self, group: Group) -> _Piece:
        empty, known = self._before.empty.get(group.group_index, (None, None))
        piece = self._earlier(known)
        if empty is None or piece is None or not _is_alike(empty, group):
            empty = _emptied(group)
            piece = self._piece(encode(empty))
        self.named.empty[group.group_index], self.named.pieces[piece.digest] = (empty, piece), piece
        return piece

    def _earlier(self, piece: _Piece | None) -> _Piece | None:
        """Return a piece of an earlier step's file; none of this one's, which may have been written before in vain."""
        return piece if piece is not None and piece.step < self._step else None


class StateFiles:
    """The state files of a run, written by one process at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._named = _Named()
        """What the newest state names."""

    def write(self, step: int, state: RunState) -> tuple[Digest, int]:
        """Put the state that a step leaves on disk; it counts when its journal entry is there.

        Returns:
            The file's digest, and the checksum of its index, which has digests of all that it names.

        Raises:
            RunFailedError: If a label, metadata or message is not JSON.
            OSError: If the disk refuses.
        """
        named, checksum = self._named, 0

        def write(file: IO[bytes]) -> None:
            nonlocal named, checksum
            writing = _Writing(step, file, self._named)
            index = writing.index_of(state)
            file.write(index)
            file.write(len(index).to_bytes(_TRAILER_BYTES, "little"))
            named, checksum = writing.named, zlib.crc32(index)

        digest = replace_digested(step_file(self._directory, STATES, step), write)
        self._named = named
        return digest, checksum

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
        self._named = _Named({piece.digest: piece for piece in index.pieces})
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
            with open_regular(path) as file:
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
    with open_regular(path) as file:
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
