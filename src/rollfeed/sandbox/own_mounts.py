"""File systems of a bounded size and number of files, in memory, for the folders of sandboxes; root's only.

They are mounted in a mount namespace that one thread of this process has for itself. So nobody else sees them, and they
are gone with this process however it ends. Programs are started in that namespace by ``nsenter``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits
from rollfeed.sandbox.launcher import load_libc, make_private, mount_tmpfs

_CLONE_NEWNS, _MNT_DETACH = 0x20000, 2
_T = TypeVar("_T")


class OwnMounts:
    """Mounts in the namespace of a thread. Raises OSError if there can be none."""

    def __init__(self) -> None:
        nsenter = shutil.which("nsenter")
        if os.geteuid() != 0 or nsenter is None:
            raise OSError("this process is not root" if nsenter else "nsenter is not installed")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox-mounts")
        self._task = f"/proc/{os.getpid()}/task/{self._thread.submit(_leave_namespace).result()}"
        self.namespace = os.readlink(f"{self._task}/ns/mnt")
        """As the kernel calls it."""
        self.prefix = (nsenter, f"--mount={self._task}/ns/mnt", "--")
        """Begins the command line of a program that is to see what is mounted."""

    def seen(self, folder: Path) -> Path:
        """Return the path under which this process sees what is mounted on a folder, or below."""
        return Path(f"{self._task}/root{folder}")

    async def mount(self, at: Path, *, mode: int, owner: int | None = None) -> None:
        """Mount an empty file system on a folder. Raises OSError."""
        options = f"mode={mode:o}" + ("" if owner is None else f",uid={owner},gid={owner}")
        await self._do(partial(mount_tmpfs, str(at), options))

    async def unmount(self, at: Path) -> None:
        """Let a file system go with all that it holds, as soon as no program has it. Raises OSError."""
        await self._do(lambda: _check(load_libc().umount2(os.fsencode(at), _MNT_DETACH)))

    @asynccontextmanager
    async def bounded(self, folder: Path, limits: ExecLimits) -> AsyncIterator[Path]:
        """Let the file system of a folder hold what a program may write, unless it holds more already.

        Yields:
            A folder beside it with the folders ``tmp`` and ``shm``, which together hold as much, and then go.

        Raises:
            SandboxError: If it cannot be made.
        """
        at = folder.parent / f"temporary-{os.urandom(6).hex()}"
        try:
            await self._do(partial(_bound, folder, at, limits))  # all at once: every call of a thread costs
            try:
                yield at
            finally:
                await self.unmount(at)
        except OSError as error:
            raise SandboxError(f"a program's temporary folder cannot be made: {error}") from error

    async def _do(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def find_own_mounts() -> OwnMounts | str:
    """Return mounts of our own, or why there are none."""
    try:
        return OwnMounts()
    except OSError as error:
        return str(error)


def _bound(folder: Path, at: Path, limits: ExecLimits) -> None:
    """Bound what a folder holds, and make the temporary folders at ``at``; in the thread that sees what is mounted."""
    size, num_files = f"size={limits.max_file_bytes},nr_inodes=", limits.max_files + 1  # the top folder is one
    with suppress(OSError):  # it holds more already, of an earlier program: then it stays as it is
        mount_tmpfs(str(folder), f"{size}{num_files}", again=True)
    at.mkdir()
    mount_tmpfs(str(at), f"mode=755,{size}{num_files + 2}")
    for name in ("tmp", "shm"):
        (at / name).mkdir()
        (at / name).chmod(0o1777)


def _leave_namespace() -> int:
    """Give this thread a mount namespace of its own, and return the thread's number."""
    _check(load_libc().unshare(_CLONE_NEWNS))
    make_private()
    return threading.get_native_id()


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
