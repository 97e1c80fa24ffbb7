"""Files and folders that are there whole or not at all, also after a power cut, and their digests; the user's cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from rollfeed.errors import CheckpointError

_ABANDONED_SECONDS = 3600.0
_CHUNK_BYTES = 1 << 20
DIGESTS = "digests.json"
"""What a sealed folder has of its other files."""
_NOT_REGULAR = "no regular file, but a pipe, a device or a socket"


class NotRegularError(OSError):
    """A pipe, a device or a socket stands where a file should."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to be read; a pipe that nobody writes to would never be open.

    Raises:
        OSError: If it cannot be opened; :class:`NotRegularError` if it is neither a file nor a folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of sockets
            raise NotRegularError(_NOT_REGULAR) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        is_folder = stat.S_ISDIR(mode)
        raise IsADirectoryError(errno.EISDIR, "a folder") if is_folder else NotRegularError(_NOT_REGULAR)
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return all that a file has. Raises OSError as :func:`open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Put what ``write`` writes at ``path``: a temporary file beside it, flushed to disk, then renamed."""
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


class Digest(NamedTuple):
    """Says what is in a file, or in its beginning."""

    size: int
    """In bytes."""
    sha256: str
    """In hexadecimal digits."""


def digest_of(path: Path, *, size: int | None = None) -> Digest:
    """Return the digest of a file, or of its first ``size`` bytes; of all that it has where it has fewer.

    Raises:
        OSError: If it cannot be read.
    """
    (found,) = digests_of_beginnings(path, [sys.maxsize if size is None else size])
    return found


def digests_of_beginnings(path: Path, sizes: Iterable[int]) -> Iterator[Digest]:
    """Yield what :func:`digest_of` returns for each size, from the smallest on; the file is read once."""
    found, num_bytes = hashlib.sha256(), 0
    with open_regular(path) as file:
        for size in sizes:
            while chunk := file.read(min(_CHUNK_BYTES, max(0, size - num_bytes))):
                found.update(chunk)
                num_bytes += len(chunk)
            yield Digest(num_bytes, found.hexdigest())


def replace_digested(path: Path, write: Callable[[IO[bytes]], object]) -> Digest:
    """Put a file as :func:`replace_file` does; return the digest of what was meant to be written."""
    made: list[_Digesting] = []

    def write_digesting(file: IO[bytes]) -> None:
        made.append(_Digesting(file))
        write(cast("IO[bytes]", made[0]))

    replace_file(path, write_digesting)
    return made[0].digest()


class _Digesting:
    """A file that is only appended to; what is written is digested on its way."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._found, self._size = hashlib.sha256(), 0
        self.flush, self.tell = file.flush, file.tell

    def write(self, content: Any) -> int:
        self._found.update(content)
        written = self._file.write(content)
        self._size += written
        return written

    def digest(self) -> Digest:
        return Digest(self._size, self._found.hexdigest())


def file_problem(path: Path, expected: Digest, *, is_whole: bool = True) -> str | None:
    """Return why a file is not what its digest says, or does not begin so; None if it is."""
    try:
        size = path.stat().st_size
        if size < expected.size or (is_whole and size > expected.size):
            return f"is damaged: it has {size:,} bytes, not {expected.size:,}"
        if digest_of(path, size=expected.size) != expected:
            return "is damaged: it is not what was written (its digest is another)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def seal_folder(folder: Path) -> None:
    """Put a file into a folder that has the digests of all others below it."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path != folder / DIGESTS)
    digests = {str(path.relative_to(folder)): digest_of(path) for path in paths}
    (folder / DIGESTS).write_text(_sealed(digests), encoding="utf-8")


def sealed_problems(folder: Path) -> dict[str, str | None]:
    """Return why each file of a sealed folder is not what it was, by name; None where it is.

    Empty where there are no digests, as in what earlier versions wrote.
    """
    try:
        text = read_regular(folder / DIGESTS).decode()
        digests = {name: Digest(*digest) for name, digest in json.loads(text).items()}
        own = None if _sealed(digests) == text else "is damaged"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {DIGESTS: f"cannot be read: {error}"}
    return {DIGESTS: own, **{name: file_problem(folder / name, digest) for name, digest in digests.items()}}


def _sealed(digests: Mapping[str, Digest]) -> str:
    return json.dumps(digests, indent=1, sort_keys=True) + "\n"


def replace_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Put a folder of files at ``folder``, in place of one that is there.

    ``fill`` puts files into the empty folder that it is handed. Nothing of them is left where it raises.
    """
    temporary = temporary_path(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder.parent)


def temporary_path(path: Path) -> Path:
    """Return where the content of a path is put together; what a killed process left there is never read."""
    return path.with_name(f".{path.name}.tmp")


def sync(path: Path) -> None:
    """Flush a file to disk, or a folder's entries: what was created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
            for path in partial.iterdir():
                sync(path)  # before their folder gets its name
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


def _remove_abandoned(cache: Path) -> None:
    """Remove what a process left behind that was killed."""
    for path in cache.glob(".*.partial"):
        try:
            age_seconds = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age_seconds > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
