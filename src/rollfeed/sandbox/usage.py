"""What a program and its descendants use at the moment; read from ``/proc`` and from the sandbox's folder."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_PAGE_BYTES = resource.getpagesize()


def resident_bytes(pid: int, *, at_most: int) -> int:
    """Return the memory that a process and its descendants hold.

    Pages that processes share are counted for each, unless that comes to more than ``at_most``: then exactly.
    """
    pids = _family(pid)
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
    """Return whether a folder holds more files or bytes than these; looks at no more than it must."""
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
        except OSError:  # gone meanwhile, or closed by the program
            continue
    return False


def _family(pid: int) -> list[int]:
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


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
