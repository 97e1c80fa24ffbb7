"""Where the user's cache is, for what is made once a machine, and how a folder gets into it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rollfeed.errors import CheckpointError

_ABANDONED_SECONDS = 3600.0


def user_cache(kind: str) -> Path:
    """Return rollfeed's cache folder of one kind, which may not exist yet."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "rollfeed" / kind


def make_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``, made by ``fill`` if it is not there.

    It appears whole, by a rename; of two processes that make it at once, one wins and the other uses the winner's.

    Args:
        folder: Named after what it holds, so that one that is there is the right one.
        fill: Puts the files into a folder that it is handed; called at most once.

    Raises:
        CheckpointError: If the disk does not take it.
    """
    if folder.is_dir():
        return folder
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".partial", dir=cache))
        try:
            fill(partial)
            _flush(partial)
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{cache}: cannot keep the model there ({error}); set XDG_CACHE_HOME to a folder with room"
        ) from error
    return folder


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _flush(folder: Path) -> None:
    """Put the files on the disk before their folder gets its name."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove_abandoned(cache: Path) -> None:
    """Remove what a process left behind that was killed."""
    for path in cache.glob(".*.partial"):
        try:
            age_seconds = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age_seconds > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
