"""Draws that wait on disk instead of in memory.

Nothing in here survives the process, and nothing need to: a run's state is what is durable.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from rollfeed.errors import RunDirectoryError, RunFailedError
from rollfeed.store.codec import decode_draw, encode_draw
from rollfeed.types import Group

_NAME = re.compile(r"draw-\d+\.spill")


@dataclass(frozen=True, slots=True)
class SpillHandle:
    """Names a group that was put on disk."""

    number: int
    num_bytes: int


class SpillFile:
    """A folder of groups; a file a group, removed when it is taken, so that the disk holds what waits and no more.

    Threads may share it: a commit reads groups while others are taken.

    Args:
        folder: Created where missing. What another process left in it is removed; other files are not touched.

    Raises:
        RunFailedError: From all methods, if the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[int, SpillHandle] = {}
        self._next = 0
        self._lock = RLock()
        self.num_bytes = 0
        """Bytes on disk."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name):
                    path.unlink()
        except OSError as error:
            raise self._refused(error) from error

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, group: Group) -> SpillHandle:
        """Write a group.

        Raises:
            RunFailedError: If a label, metadata or message is not JSON.
        """
        encoded = encode_draw(group)
        with self._lock:
            handle = SpillHandle(self._next, len(encoded))
            self._next += 1
            self._waiting[handle.number] = handle
            self.num_bytes += handle.num_bytes
            try:
                self._path(handle).write_bytes(encoded)
            except OSError as error:
                with suppress(OSError):
                    self._remove(handle)
                raise self._refused(error) from error
        return handle

    def peek(self, handle: SpillHandle) -> Group:
        """Return a group that stays where it is.

        Raises:
            KeyError: If it has been taken.
            RunFailedError: If its file is damaged.
        """
        try:
            return decode_draw(self._read(handle))
        except RunDirectoryError as error:
            raise RunFailedError(str(error)) from error

    def take(self, handle: SpillHandle) -> Group:
        """Return a group and remove it.

        Raises:
            KeyError: If it has been taken.
            RunFailedError: If its file is damaged.
        """
        with self._lock:
            group = self.peek(handle)
            self._remove(handle)
        return group

    def close(self) -> None:
        """Remove everything, the folder too when nothing else is in it; may be called twice."""
        with self._lock:
            for handle in list(self._waiting.values()):
                self._remove(handle)
            with suppress(OSError):  # gone already, or not ours alone
                self._folder.rmdir()

    def _read(self, handle: SpillHandle) -> bytes:
        with self._lock:
            if handle.number not in self._waiting:
                raise KeyError(handle)
            try:
                return self._path(handle).read_bytes()
            except OSError as error:
                raise self._refused(error) from error

    def _remove(self, handle: SpillHandle) -> None:
        del self._waiting[handle.number]
        self.num_bytes -= handle.num_bytes
        self._path(handle).unlink(missing_ok=True)

    def _path(self, handle: SpillHandle) -> Path:
        return self._folder / f"draw-{handle.number}.spill"

    def _refused(self, error: OSError) -> RunFailedError:
        return RunFailedError(f"{self._folder}: the buffer cannot be put there: {error.strerror}; make room")
