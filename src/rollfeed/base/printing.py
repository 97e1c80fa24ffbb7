"""Sends what functions of users print in this process to a file, apart from what rollfeed itself prints."""

from __future__ import annotations

import sys
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
    """Append to a file what users' functions print while the block runs; it is made with the first of it."""
    before = sys.stdout
    router: Any = _Router(before, path)
    sys.stdout = router
    try:
        yield
    finally:
        if sys.stdout is router:
            sys.stdout = before
        router.end()


class _Router:
    """Stands for standard output."""

    def __init__(self, stdout: TextIO, path: Path) -> None:
        self._stdout = stdout
        self._path = path
        self._file: TextIO | None = None
        self._has_ended = False

    def write(self, text: str) -> int:
        if not _IS_USERS.get() or self._has_ended:  # a stuck thread may print when the run is over
            return self._stdout.write(text)
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        return self._file.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stdout.flush()

    def end(self) -> None:
        """Close the file."""
        self._has_ended = True
        if self._file is not None:
            self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)
