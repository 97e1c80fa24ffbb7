"""Files of a folder in which a program of a model may have planted links, pipes and closed folders.

Invariant: nothing outside of the folder is read, written or deleted, and nothing waits.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from rollfeed.errors import SandboxError

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DELETE_ATTEMPTS = 20
_DELETE_PAUSE_SECONDS = 0.05
_HELD = "rollfeed-sandbox-held-"
_LOCKS: dict[Path, int] = {}
"""Of the folders that this process holds."""
_SWEPT: set[Path] = set()
"""Where it has looked for folders left behind."""


def parts_within(path: str) -> tuple[str, ...]:
    """Return the parts of a path that stays inside. Raises SandboxError if it is empty, absolute or goes up."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise SandboxError(f"{path!r:.200} is no path inside the sandbox's folder: give it relative, without ..")
    return parts


def read_within(folder: Path, path: str, *, max_bytes: int) -> bytes:
    """Return a plain file's content; as :meth:`Sandbox.read`."""
    *parents, name = parts_within(path)
    try:
        with _opened(folder, parents, owner=None) as inside:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=inside)
            with os.fdopen(file, "rb") as opened:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise SandboxError(f"{path!r:.200} is not a plain file")
                content = opened.read(max_bytes + 1)
    except OSError as error:
        raise SandboxError(f"{path!r:.200} cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise SandboxError(f"{path!r:.200} is larger than {max_bytes} bytes")
    return content


def write_within(folder: Path, path: str, content: bytes, *, owner: int | None) -> None:
    """Make or replace a plain file, owned by ``owner``; as :meth:`Sandbox.write`."""
    *parents, name = parts_within(path)
    try:
        with _opened(folder, parents, owner=owner, make=True) as inside:
            # A new file in place of whatever is there, so that no link is followed and no pipe waited for.
            fresh = f".{name[:100]}.{os.urandom(8).hex()}"
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=inside)
            with os.fdopen(file, "wb") as opened:
                if owner is not None:
                    os.fchown(file, owner, owner)
                opened.write(content)
            os.replace(fresh, name, src_dir_fd=inside, dst_dir_fd=inside)
    except OSError as error:
        raise SandboxError(f"{path!r:.200} cannot be written: {error.strerror}") from error


def make_held_folder(place: Path | None) -> Path:
    """Make a folder of this process's own in a place, the temporary one by default, until :func:`delete_folder`.

    Those of processes that were killed are deleted first, once a process: nobody holds their lock any more.
    """
    where = Path(tempfile.gettempdir() if place is None else place)
    if where not in _SWEPT:
        _SWEPT.add(where)
        _delete_abandoned(where)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_HELD, dir=where))
        # Another process may take it for one that is left behind until it is locked, and delete it.
        with suppress(FileNotFoundError):
            lock = os.open(folder, _FOLDER_FLAGS)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                _LOCKS[folder] = lock
                return folder
            os.close(lock)


def _delete_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_HELD}*"):
        with suppress(OSError):  # it is in use, somebody else's, or just gone
            lock = os.open(folder, _FOLDER_FLAGS)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    delete_folder(folder)
            finally:
                os.close(lock)


def delete_folder(folder: Path) -> None:
    """Delete a folder, whatever its permissions and depth; links are deleted, not followed."""
    try:
        _delete(folder)
    finally:
        if (lock := _LOCKS.pop(folder, None)) is not None:
            os.close(lock)


def _delete(folder: Path) -> None:
    for attempt in range(_DELETE_ATTEMPTS):
        try:
            top = _open_up(str(folder), None)
            try:
                _empty(top)
            finally:
                os.close(top)
            folder.rmdir()
            return
        except OSError:  # killed programs may not have come to their end, and so have made another file meanwhile
            if attempt == _DELETE_ATTEMPTS - 1:
                raise
            time.sleep(_DELETE_PAUSE_SECONDS)


def _empty(top: int) -> None:
    """Delete what is in a folder; a folder in a folder is moved up first, so that no path and no stack gets long."""
    folders = _delete_files(top)
    while folders:
        name = folders.pop()
        inside = _open_up(name, top)
        try:
            for deeper in _delete_files(inside):
                os.close(_open_up(deeper, inside))  # one without write permission cannot be moved
                moved = f".{os.urandom(12).hex()}"
                os.rename(deeper, moved, src_dir_fd=inside, dst_dir_fd=top)
                folders.append(moved)
        finally:
            os.close(inside)
        os.rmdir(name, dir_fd=top)


def _delete_files(inside: int) -> list[str]:
    """Delete the files of a folder and return the names of its folders."""
    with os.scandir(inside) as entries:
        listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in listed:
        if not is_folder:
            os.unlink(name, dir_fd=inside)
    return [name for name, is_folder in listed if is_folder]


def _open_up(name: str, inside: int | None) -> int:
    """Give a folder all permissions and open it; the name may have become a link meanwhile, which is not followed."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(found)


@contextmanager
def _opened(folder: Path, parents: list[str], *, owner: int | None, make: bool = False) -> Iterator[int]:
    inside = os.open(folder, _FOLDER_FLAGS)
    try:
        for part in parents:
            if make:
                _make_folder(part, inside, owner)
            deeper = os.open(part, _FOLDER_FLAGS, dir_fd=inside)
            os.close(inside)
            inside = deeper
        yield inside
    finally:
        os.close(inside)


def _make_folder(name: str, inside: int, owner: int | None) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=inside)
    except FileExistsError:
        return
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=inside, follow_symlinks=False)
