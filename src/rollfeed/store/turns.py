"""The turn journal of a run directory: what rollouts have done in their turns, in one file that is appended to.

A file that nobody writes to does not exist. Each entry is there whole or not at all, and what a step forgets is gone
when that step is committed: until then a killed process goes back to the commit before, and resumes what it had.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any

import msgspec

from rollfeed.base.atomic import read_regular, replace_file
from rollfeed.base.sealed import array_as_bytes, array_of_bytes, sealed, unsealed
from rollfeed.errors import RunFailedError
from rollfeed.protocols import RolloutRequest, TurnJournal
from rollfeed.types import Answered, Called, Replied, RunState, Sampled, Turn

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sampled, Called, Answered, Replied)}
_SMALL_BYTES = 1 << 24
"""What a file may have that is forgotten before it is written anew."""


class _Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    group_index: int
    rollout_id: int
    kind: str
    turn: bytes


class _Forgotten(msgspec.Struct, array_like=True, frozen=True, tag="forgotten"):
    group_index: int
    step: int


_Entry = _Done | _Forgotten


class TurnFile(TurnJournal):
    """A turn journal on the disk.

    What is of no use to what goes on from ``state``, the last commit, is removed.

    Raises:
        RunFailedError: From all methods, if the disk refuses.
    """

    def __init__(self, path: Path, state: RunState | None) -> None:
        super().__init__()
        self._path = path
        self._lock = Lock()
        self._file: IO[bytes] | None = None
        self._large_bytes = _SMALL_BYTES
        if not path.exists():
            return
        known = {group.group_index for group in (*state.in_flight, *state.requeued)} if state is not None else set()
        kept = [
            entry
            for entry in _live(_read(path), next_step=0 if state is None else state.next_step)
            if isinstance(entry, _Done)
            and (state is None or entry.group_index >= state.next_group_index or entry.group_index in known)
        ]
        for entry in kept:
            turns = self._turns.setdefault(entry.group_index, {}).setdefault(entry.rollout_id, [])
            turns.append(decode_turn(entry.kind, entry.turn))
        self._rewrite(kept)

    def write(self, request: RolloutRequest, turn: Turn) -> None:
        self._append(_Done(request.group_index, request.rollout_id, *encode_turn(turn)))
        super().write(request, turn)

    async def flush(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(os.fsync, self._file.fileno())

    def forget(self, group_index: int, *, step: int) -> None:
        if group_index in self._turns:
            self._append(_Forgotten(group_index, step))
        super().forget(group_index, step=step)

    def committed(self, next_step: int) -> None:
        """Remove what is forgotten, if that is all there is or much; called after a commit."""
        with self._lock:
            if self._file is None or (self._turns and self._file.tell() < self._large_bytes):
                return
            self.close()
            self._rewrite(_live(_read(self._path), next_step=next_step))

    def close(self) -> None:
        """Close the file; what is written later opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, entry: _Entry) -> None:
        with self._lock:
            try:
                self._file = self._file or self._path.open("ab", buffering=0)
                self._file.write(_sealed(entry))
            except OSError as error:
                raise RunFailedError(f"{self._path}: a turn cannot be stored: {error.strerror}; make room") from error

    def _rewrite(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            self._path.unlink()
            return
        replace_file(self._path, lambda file: file.writelines(map(_sealed, entries)))
        self._large_bytes = _SMALL_BYTES + 2 * self._path.stat().st_size


def encode_turn(turn: Turn) -> tuple[str, bytes]:
    """Return the kind of a turn, and the turn as bytes."""
    return type(turn).__name__, msgspec.msgpack.encode(turn, enc_hook=array_as_bytes)


def decode_turn(kind: str, encoded: bytes) -> Turn:
    """Return the turn that :func:`encode_turn` was given."""
    turn: Turn = msgspec.msgpack.decode(encoded, type=_KINDS[kind], dec_hook=array_of_bytes)
    return turn


def _live(entries: Iterator[_Entry], *, next_step: int) -> list[_Entry]:
    """Return what still counts after the commit before ``next_step``.

    What a later step has forgotten counts as long as nothing follows: the group may not have begun again.
    """
    live: dict[int, list[_Entry]] = {}
    for entry in entries:
        before = live.setdefault(entry.group_index, [])
        if isinstance(entry, _Forgotten):
            if entry.step < next_step:
                before.clear()
            else:
                before.append(entry)
            continue
        if before and isinstance(before[-1], _Forgotten):
            before.clear()
        before.append(entry)
    return [entry for each in live.values() for entry in each]


def _read(path: Path) -> Iterator[_Entry]:
    return (msgspec.msgpack.decode(packed, type=_Entry) for packed in unsealed(read_regular(path)))


def _sealed(entry: _Entry) -> bytes:
    return sealed(msgspec.msgpack.encode(entry))
