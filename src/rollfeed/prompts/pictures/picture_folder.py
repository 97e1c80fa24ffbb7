"""Bytes of pictures in files, each once, named by its hash.

Before a run has its directory, and for commands that have none, the files are in a temporary folder; a picture that
came from a file of the user's is read from there until a prompt that shows it is drawn.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollfeed.base.atomic import open_regular, replace_file
from rollfeed.errors import RunFailedError
from rollfeed.types import Picture

_ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "image/gif": "gif", "image/bmp": "bmp"}


_LEAST_FILE_BYTES = 4096
"""Of the disk: tiny pictures are bounded in their number by that."""
SERVED_BYTES = 1 << 30
"""Most of those that servers keep for their clients without a folder."""


def file_name(picture: Picture) -> str:
    """Return what a picture's file is called."""
    return f"{picture.content_hash}.{_ENDINGS.get(picture.media_type, 'bin')}"


class PictureFolder:
    """Keeps pictures in a folder; fits :class:`rollfeed.protocols.PictureStore`.

    Args:
        folder: Where; by default a temporary one, until :meth:`open` names another.
    """

    max_temporary_bytes = math.inf
    """In the temporary folder; beyond it, what was not wanted for longest leaves."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._sizes = OrderedDict[Path, int]()
        """Bytes of temporary files, what was wanted last at the end."""
        self._num_bytes = 0
        """Of all of them."""
        self._temporary: Path | None = None
        self._origins: dict[str, Path] = {}
        self._lock = threading.Lock()
        self.has_any = False
        """Whether there has been a picture."""

    def put(self, picture: Picture, content: bytes, *, origin: Path | None = None) -> Picture:
        """Keep the bytes of a picture, unless they are there; return the picture.

        With ``origin``, a file that has just these bytes, they are read from there until :meth:`keep`.
        """
        self.has_any = True
        if origin is not None:
            self._origins.setdefault(picture.content_hash, origin)
        elif self._found(picture) is None:
            self._write(self._home(), picture, content)
        return picture

    def has(self, picture: Picture) -> bool:
        return self._found(picture) is not None or picture.content_hash in self._origins

    def read(self, picture: Picture) -> bytes:
        """Return the bytes of a picture.

        Raises:
            RunFailedError: If they are not there any more, or are others.
        """
        path = self._found(picture) or self._origins.get(picture.content_hash)
        told = f"picture {picture.source or picture.content_hash}"
        if path is None:
            raise RunFailedError(f"{told}: its bytes are not kept here; start from a run that has its pictures folder")
        try:
            with open_regular(path) as file:
                content = file.read()
        except OSError as error:
            raise RunFailedError(f"{told}: cannot be read any more: {error}; put the file back") from error
        if hashlib.sha256(content).hexdigest() != picture.content_hash:
            raise RunFailedError(f"{told}: {path} has changed since it was loaded; put the file back")
        return content

    def open(self, folder: Path) -> None:
        """Keep what comes from now on in a folder; what a killed process left there half is removed."""
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        self.has_any = self.has_any or folder.is_dir()
        with self._lock:
            self._folder = folder

    def keep(self, pictures: Iterable[Picture]) -> None:
        """Have pictures in the folder itself, so that they are there whatever becomes of where they came from.

        Raises:
            RunFailedError: As :meth:`read`.
        """
        for picture in pictures:
            if self._folder is not None and not self._path(self._folder, picture).exists():
                self._write(self._folder, picture, self.read(picture))

    def _home(self) -> Path:
        with self._lock:
            if self._folder is not None:
                return self._folder
            if self._temporary is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="rollfeed-pictures-"))
                weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
            return self._temporary

    def _found(self, picture: Picture) -> Path | None:
        homes = (self._folder, self._temporary)
        paths = (self._path(home, picture) for home in homes if home is not None)
        found = next((path for path in paths if path.exists()), None)
        with self._lock:
            if found is not None and found in self._sizes:
                self._sizes.move_to_end(found)
        return found

    def _make_room(self, written: Path, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(written, 0)
            self._sizes[written] = size = max(num_bytes, _LEAST_FILE_BYTES)
            self._num_bytes += size
            while len(self._sizes) > 1 and self._num_bytes > self.max_temporary_bytes:
                oldest, size = self._sizes.popitem(last=False)
                self._num_bytes -= size
                oldest.unlink(missing_ok=True)

    def _path(self, home: Path, picture: Picture) -> Path:
        return home / file_name(picture)

    def _write(self, home: Path, picture: Picture, content: bytes) -> None:
        try:
            home.mkdir(parents=True, exist_ok=True)
            if home is self._folder:
                with self._lock:
                    replace_file(self._path(home, picture), lambda file: file.write(content))
            else:
                own = home / f"{os.getpid()}-{threading.get_ident()}"
                own.write_bytes(content)
                own.replace(self._path(home, picture))
                self._make_room(self._path(home, picture), len(content))
        except OSError as error:
            with suppress(OSError):
                home.rmdir()
            raise RunFailedError(f"{home}: cannot keep pictures there: {error}; make room") from error
