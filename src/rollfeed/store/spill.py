"""Draws that wait on disk instead of in memory.

Nothing in here survives the process, and nothing need to: a run's state is what is durable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

from rollfeed.errors import RunDirectoryError, RunFailedError
from rollfeed.store.codec import decode, encode
from rollfeed.types import Group

_NAME = re.compile(r"draw-\d+\.spill")


class SpillFile:
    """A folder of groups; a file a group, removed when it is taken, so that the disk holds what waits and no more.

    Threads may share it: a commit reads groups while others are taken.

    Args:
        folder: Created where missing. What another process left in it is removed; other files are not touched.

    Raises:
        RunFailedError: From all methods, if the disk refuses or a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: set[int] = set()
        self._next = 0
        self._lock = RLock()
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name):
                    path.unlink()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, group: Group) -> int:
        """Write a group; return its number. Raises RunFailedError if a label, metadata or message is not JSON."""
        encoded = encode(group)
        with self._lock, self._explained():
            number = self._next
            try:
                self._path(number).write_bytes(encoded)
            except OSError:
                with suppress(OSError):
                    self._path(number).unlink(missing_ok=True)
                raise
            self._next += 1
            self._waiting.add(number)
        return number

    def peek(self, number: int) -> Group:
        """Return a group that stays where it is; KeyError if it has been taken."""
        with self._lock, self._explained():
            if number not in self._waiting:
                raise KeyError(number)
            encoded = self._path(number).read_bytes()
        with self._explained():
            return decode(Group, encoded)

    def take(self, number: int) -> Group:
        """Return a group and remove it; KeyError if it has been taken."""
        with self._lock, self._explained():
            group = self.peek(number)
            self._remove(number)
        return group

    def close(self) -> None:
        """Remove everything, the folder too when nothing else is in it; may be called twice."""
        with self._lock:
            for number in list(self._waiting):
                self._remove(number)
            with suppress(OSError):  # gone already, or not ours alone
                self._folder.rmdir()

    def _remove(self, number: int) -> None:
        self._waiting.remove(number)
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"draw-{number}.spill"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self._folder}: the buffer cannot be put there: {error.strerror}; make room"
            raise RunFailedError(message) from error
        except RunDirectoryError as error:
            raise RunFailedError(str(error)) from error
