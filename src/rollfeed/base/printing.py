"""Sends what functions of users print in this process to a file, apart from what rollfeed itself prints."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

_IS_USERS: ContextVar[bool] = ContextVar("is_users", default=False)


@contextmanager
def users_printing() -> Iterator[None]:
    """Count what is printed in the block as the user's, in this task and in threads that get its context."""
    token = _IS_USERS.set(True)
    try:
        yield
    finally:
        _IS_USERS.reset(token)


@contextmanager
def keeping_prints(path: Path) -> Iterator[None]:
    """Append to a file what users' functions print while the block runs, a line at a time.

    It is made with the first of it, and removed at the end if somebody else has made it and nobody has written to it.
    A block within another one of the same file leaves all of this to that.
    """
    before: Any = sys.stdout
    if isinstance(before, _Router) and before.path == path:
        yield
        return
    router: Any = _Router(before, path)
    sys.stdout = router
    try:
        yield
    finally:
        if sys.stdout is router:
            sys.stdout = before
        router.end()
        if path.exists() and not path.stat().st_size:
            path.unlink()


class _Router:
    """Stands for standard output."""

    def __init__(self, stdout: TextIO, path: Path) -> None:
        self._stdout = stdout
        self.path = path
        self._file: TextIO | None = None
        self._begun: dict[int, str] = {}
        """The line that a thread has begun, by its number: others may print before it goes on."""
        self._lock = threading.RLock()  # a finalizer may print in a print
        self._has_ended = False

    def write(self, text: str) -> int:
        if not _IS_USERS.get() or self._has_ended:  # a stuck thread may print when the run is over
            return self._stdout.write(text)
        with self._lock:
            thread = threading.get_ident()
            lines, newline, self._begun[thread] = (self._begun.get(thread, "") + text).rpartition("\n")
            if newline:
                self._put(lines + newline)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stdout.flush()

    def end(self) -> None:
        """Write the lines that have no end, and close the file."""
        with self._lock:
            self._has_ended = True
            self._put("".join(f"{line}\n" for line in self._begun.values() if line))
            if self._file is not None:
                self._file.close()

    def _put(self, text: str) -> None:
        if text and self._file is None:
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        if text and self._file is not None:
            self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)
