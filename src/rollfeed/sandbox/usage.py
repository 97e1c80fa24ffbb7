"""Measures what a program and its descendants use at the moment; read from ``/proc`` and from the sandbox's folder."""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


def resident_bytes(pid: int, *, at_most: int) -> int:
    """Return the memory that a process and its descendants hold.

    Pages that processes share are counted for each, unless that comes to more than ``at_most``: then exactly.
    """
    pids = family(pid)
    resident = sum(_resident_bytes(member) for member in pids)
    return resident if resident <= at_most else sum(_proportional_bytes(member) for member in pids)


def children(pid: int) -> list[int]:
    """Return the processes that a process started and has not waited for."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for thread in threads for word in _read(f"/proc/{pid}/task/{thread}/children").split()]


def files_exceed(folder: Path, *, num_files: int, num_bytes: int) -> bool:
    """Return whether a folder holds more files or bytes than these, or paths too long to look at."""
    files_left, bytes_left = num_files, num_bytes
    folders = [str(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files_left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        bytes_left -= entry.stat(follow_symlinks=False).st_blocks * 512
                    if files_left < 0 or bytes_left < 0:
                        return True
        except OSError as error:  # gone meanwhile, or closed by the program
            if error.errno == errno.ENAMETOOLONG:  # deeper than can be looked at
                return True
    return False


def nameless_bytes(pid: int) -> int:
    """Return the size of the files that a process and its descendants hold open but that no folder has.

    These are deleted ones and ``memfd_create``'s, which are on the disk or in memory without being seen there.
    """
    sizes: dict[tuple[int, int], int] = {}
    for member in family(pid):
        try:
            with os.scandir(f"/proc/{member}/fd") as entries:
                paths = [entry.path for entry in entries]
        except OSError:
            continue
        for path in paths:
            with suppress(OSError):  # closed meanwhile
                found = os.stat(path)
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                    sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found, unseen = [], [pid]
    while unseen:
        member = unseen.pop()
        found.append(member)
        unseen += children(member)
    return found


def _resident_bytes(pid: int) -> int:
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) * _PAGE_BYTES if words else 0


def _proportional_bytes(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident_bytes(pid)


def status_words(path: str) -> list[str]:
    """Return the fields of a ``stat`` file from the state on; none where the process is gone."""
    return _read(path).decode(errors="replace").rpartition(")")[2].split()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
