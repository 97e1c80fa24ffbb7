"""The lock of the process that works on a run."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from rollfeed.errors import RunDirectoryError
from rollfeed.store.layout import LOCK

# Whoever asks is_held() holds the lock for some microseconds; a start must not mistake that for a run.
_RETRY_SECONDS = 0.05


class RunLock:
    """The lock of a run directory, held until :meth:`release` or the end of the process.

    Raises:
        RunDirectoryError: If another process holds it.
        OSError: If the lock file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(self._descriptor):
            time.sleep(_RETRY_SECONDS)
            if not _try_lock(self._descriptor):
                os.close(self._descriptor)
                raise RunDirectoryError(held_message(directory))
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let others work on the run; may be called twice."""
        if self._descriptor is not None:
            # Unlocked first: a forked child may still have the descriptor open.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def is_held(directory: Path) -> bool:
    """Whether a process works on the run."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def held_message(directory: Path) -> str:
    """Return the line that says who holds the lock and what to do."""
    holder = (directory / LOCK).read_text(errors="replace").strip() or "unknown"
    return f"{directory}: process {holder} is working on this run; stop it, or choose another --out"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
