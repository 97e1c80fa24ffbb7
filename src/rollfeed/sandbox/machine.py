"""What of this machine a program sees, and as whom it runs."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOX = "/box"
"""The sandbox's folder, as programs see it where the machine's files are hidden."""
_USER_OFFSET = 0x6000_0000


@dataclass(frozen=True, slots=True)
class Mount:
    """One piece of a program's file system."""

    kind: str
    """``folder``, ``file``, ``symlink`` or ``tmpfs``."""
    at: str
    source: str = ""
    writable: bool = False
    mode: str = "755"
    size: int = 0
    """Bytes of a ``tmpfs``."""


def interpreter() -> str:
    """Return the Python interpreter itself, outside of any virtual environment."""
    return os.path.realpath(sys.executable)


@cache
def system_mounts() -> tuple[Mount, ...]:
    """Return the system's programs and libraries and the interpreter's, all read-only."""
    mounts = [Mount("folder", "/usr", "/usr")]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            mounts.append(Mount("symlink", path, os.readlink(path)))
        elif os.path.isdir(path):
            mounts.append(Mount("folder", path, path))
    for path in ("/etc/ld.so.cache", "/etc/localtime"):
        if os.path.isfile(path):
            mounts.append(Mount("file", path, os.path.realpath(path)))
    if os.path.isdir("/etc/alternatives"):
        mounts.append(Mount("folder", "/etc/alternatives", "/etc/alternatives"))
    own = [Path(interpreter()).parents[1], *(Path(path).resolve() for path in (sys.base_prefix, sys.base_exec_prefix))]
    for folder in dict.fromkeys(own):
        if not any(folder.is_relative_to(mount.at) for mount in mounts if mount.kind == "folder"):
            mounts.append(Mount("folder", str(folder), str(folder)))
    return tuple(mounts)


def private_mounts(folder: Path, *, temporary_bytes: int) -> tuple[Mount, ...]:
    """Return the writable places: the sandbox's folder, and temporary ones that a program's end empties."""
    return (
        Mount("tmpfs", "/tmp", mode="1777", size=temporary_bytes),
        Mount("folder", BOX, str(folder), writable=True),
    )


def pick_user() -> int | None:
    """Return a user number that nobody has, for programs that root starts; None when this process is not root.

    The kernel does not count root's processes, and a program must not be able to signal us.
    """
    if os.geteuid() != 0:
        return None
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").split("\n")
        start, _, size = max(([int(word) for word in line.split()] for line in lines if line), key=lambda row: row[2])
    except (OSError, ValueError):
        start, size = 0, 65_536
    offset = min(size // 2, _USER_OFFSET)
    return start + offset + random.SystemRandom().randrange(min(size // 4, 1 << 28))
