"""The folder of a gateway: its sessions and their turns, and the samples of those that were finished.

``turns.journal`` is written before anything is answered, so that a gateway that was killed knows all that its agents
know. ``samples.jsonl`` has each sample once: where in it a session's are is written before they are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from rollfeed.base.atomic import replace_file
from rollfeed.base.sealed import array_as_bytes, array_of_bytes, sealed, unsealed
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.types import Replied

_MOST_ENDED = 256
"""Sessions that have ended of which samples are kept in memory."""
SAMPLES, TURNS = "samples.jsonl", "turns.journal"


class SessionOpened(msgspec.Struct, array_like=True, frozen=True, tag="opened"):
    """A session was opened."""

    session_id: str
    key: str
    number: int
    """Of all sessions of the folder, in their order."""
    at: float
    """Seconds since 1970."""
    about: dict[str, Any]
    """What its opener said: JSON values."""


class _Done(msgspec.Struct, array_like=True, frozen=True, tag="turn"):
    session_id: str
    turn: bytes


class SessionEnded(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """A session was finished, or dropped."""

    session_id: str
    number: int
    start: int
    """Bytes of the samples' file before its own."""
    size: int
    """Bytes of its own samples."""
    lines: bytes = b""
    """Those, while they may not be there yet."""


_Entry = SessionOpened | _Done | SessionEnded


@dataclass(slots=True)
class StoredSession:
    """A session that has not ended, as an earlier process left it."""

    opened: SessionOpened
    turns: list[Replied] = field(default_factory=list)


class SessionJournal:
    """Keeps sessions; this one in memory, which is to say not at all."""

    def __init__(self) -> None:
        self.sessions: dict[str, StoredSession] = {}
        """Those that an earlier process has left."""
        self.ended: dict[str, SessionEnded] = {}

    def opened(self, entry: SessionOpened) -> None:
        """Keep that a session was opened."""

    def turn(self, session_id: str, turn: Replied) -> None:
        """Keep a turn."""

    def ends(self, session_id: str, number: int, lines: Sequence[bytes]) -> None:
        """Keep the samples of a session that ends, a line each."""
        self.ended[session_id] = SessionEnded(session_id, number, 0, 0, b"".join(lines))
        while len(self.ended) > _MOST_ENDED:
            del self.ended[next(iter(self.ended))]

    def samples(self, session_id: str) -> bytes:
        """Return the lines of a session that has ended."""
        return self.ended[session_id].lines

    def close(self) -> None:
        """Close the files."""


class FolderJournal(SessionJournal):
    """A journal in a folder, of one process at a time.

    Args:
        folder: Made if it is not there.
        spare_bytes: What the journal may have of sessions that have ended before it is written anew.

    Raises:
        ConfigError: If it cannot be written to, or another process has it.
        RunFailedError: From all methods, if the disk refuses.
    """

    def __init__(self, folder: Path, *, spare_bytes: int = 1 << 28) -> None:
        super().__init__()
        self._spare_bytes = spare_bytes
        self._turns, self._samples = folder / TURNS, folder / SAMPLES
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / ".lock")
            entries = self._read()
            self._samples.touch()
            self._mend(entries)
            self._rewrite(entries)
        except OSError as error:
            raise ConfigError(f"{folder}: sessions cannot be kept there: {error.strerror or error}") from error

    def opened(self, entry: SessionOpened) -> None:
        self._append(entry)

    def turn(self, session_id: str, turn: Replied) -> None:
        self._append(_Done(session_id, msgspec.msgpack.encode(turn, enc_hook=array_as_bytes)))

    def ends(self, session_id: str, number: int, lines: Sequence[bytes]) -> None:
        joined = b"".join(lines)
        start = self._samples.stat().st_size
        self._append(SessionEnded(session_id, number, start, len(joined), joined))
        self.ended[session_id] = SessionEnded(session_id, number, start, len(joined))
        self._write_samples(joined, start)
        if self._file.tell() > self._large_bytes:
            self._file.close()
            self._rewrite(self._entries())

    def samples(self, session_id: str) -> bytes:
        ended = self.ended[session_id]
        with self._samples.open("rb") as file:
            file.seek(ended.start)
            return file.read(ended.size)

    def close(self) -> None:
        self._file.close()
        os.close(self._lock)

    def _entries(self) -> list[_Entry]:
        content = self._turns.read_bytes() if self._turns.exists() else b""
        return [msgspec.msgpack.decode(each, type=_Entry) for each in unsealed(content)]

    def _read(self) -> list[_Entry]:
        entries = self._entries()
        for entry in entries:
            if isinstance(entry, SessionOpened):
                self.sessions[entry.session_id] = StoredSession(entry)
            elif isinstance(entry, SessionEnded):
                self.sessions.pop(entry.session_id, None)
                self.ended[entry.session_id] = SessionEnded(entry.session_id, entry.number, entry.start, entry.size)
            elif entry.session_id in self.sessions:
                turn = msgspec.msgpack.decode(entry.turn, type=Replied, dec_hook=array_of_bytes)
                self.sessions[entry.session_id].turns.append(turn)
        return entries

    def _mend(self, entries: Sequence[_Entry]) -> None:
        """Write the samples of the last session that ended, which a kill may have prevented."""
        last = next((entry for entry in reversed(entries) if isinstance(entry, SessionEnded) and entry.lines), None)
        if last is not None and self._samples.stat().st_size < last.start + last.size:
            os.truncate(self._samples, last.start)
            self._write_samples(last.lines, last.start)

    def _rewrite(self, entries: Sequence[_Entry]) -> None:
        """Write the journal anew, without turns of sessions that have ended nor what a kill has left of an entry."""
        live = [each for each in entries if not isinstance(each, SessionEnded) and each.session_id not in self.ended]
        replace_file(self._turns, lambda file: file.writelines(map(_sealed, [*self.ended.values(), *live])))
        self._file: IO[bytes] = self._turns.open("ab", buffering=0)
        self._large_bytes = 2 * self._file.tell() + self._spare_bytes

    def _write_samples(self, lines: bytes, start: int) -> None:
        try:
            with self._samples.open("r+b", buffering=0) as file:
                file.seek(start)
                file.write(lines)
        except OSError as error:
            raise _full(self._samples, error) from error

    def _append(self, entry: _Entry) -> None:
        content, size = _sealed(entry), self._file.tell()
        try:
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)  # nothing behind half an entry would be read
            raise _full(self._turns, error) from error


def recorded_turns(folder: Path) -> dict[str, dict[int, int]]:
    """Return the turns that a folder's journal still has, by session: the hash of the logprobs by that of the ids."""
    found: dict[str, dict[int, int]] = {}
    path = folder / TURNS
    for content in unsealed(path.read_bytes()) if path.exists() else ():
        entry = msgspec.msgpack.decode(content, type=_Entry)
        if isinstance(entry, _Done):
            said = msgspec.msgpack.decode(entry.turn, type=Replied, dec_hook=array_of_bytes).completion
            known = found.setdefault(entry.session_id, {})
            known[hash(said.token_ids.tobytes())] = hash(said.logprobs.tobytes())
    return found


def _sealed(entry: _Entry) -> bytes:
    return sealed(msgspec.msgpack.encode(entry))


def _full(path: Path, error: OSError) -> RunFailedError:
    return RunFailedError(f"{path}: a session cannot be kept: {error.strerror or error}; make room")


def _locked(path: Path) -> int:
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{path.parent}: another gateway keeps its sessions there; name another folder") from None
    return descriptor


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return a line of JSON."""
    return msgspec.json.encode(value) + b"\n"
