"""A folder of this process's own for versions, which does not outlive it for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from rollfeed.errors import EngineProtocolError

KEPT_FOLDERS = 2
"""A server that comes back late loads the last one; the one before may still be being read."""
_PREFIX, _LOCK = "rollfeed-weights-", ".lock"


class VersionsHome:
    """Makes the folder when it is first asked for, and holds a lock in it.

    Folders whose lock nobody holds any more, since a process was killed, go when another one is made beside them.

    Args:
        place: The folder to make it in. The temporary one where it is None; then it goes with this object, too.
    """

    def __init__(self, place: Path | None = None) -> None:
        self._place = place
        self._path: Path | None = None
        self._written: list[Path] = []

    @property
    def path(self) -> Path:
        """The folder.

        Raises:
            EngineProtocolError: If it cannot be made.
        """
        if self._path is None:
            place = Path(tempfile.gettempdir()) if self._place is None else self._place
            try:
                place.mkdir(parents=True, exist_ok=True)
                _collect(place)
                path, lock = _locked_folder(place.resolve())
            except OSError as error:
                raise EngineProtocolError(
                    f"no weights can be written to {place}: {error}; set weights_folder to a folder that can be written"
                ) from error
            self._path = path
            self._end = weakref.finalize(self, _let_go, lock, path if self._place is None else None)
        return self._path

    def keep(self, folder: Path) -> None:
        """Keep the folder of a new version, and remove older ones but for the last."""
        self._written.append(folder)
        while len(self._written) > KEPT_FOLDERS:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def close(self) -> None:
        """Remove the folder where it is temporary, and let go of it."""
        if self._path is not None:
            self._end()
            self._path = None


def _locked_folder(place: Path) -> tuple[Path, int]:
    """Make a folder and take its lock, which another process that collects may have taken for one left behind."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        path.chmod(0o755)
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        os.close(lock)


def _let_go(lock: int, temporary: Path | None) -> None:
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    os.close(lock)


def _collect(place: Path) -> None:
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # it is in use, somebody else's, or just gone
            continue
