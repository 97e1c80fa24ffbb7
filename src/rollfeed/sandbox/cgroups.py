"""Control groups of programs, below the one that this process is in: memory of all kinds, and CPU time to the last.

Version 2 where it is delegated to us, version 1 where its folders may be written, as root's may. What a group counts
includes processes that have ended, shared memory and the temporary file systems that the program fills.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_V1 = ("memory", "cpu", "cpuacct")
_TRIES, _PAUSE_SECONDS = 40, 0.05
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one program; it has its share of the cores, as every other has."""

    folders: tuple[Path, ...]
    """One in each hierarchy."""
    is_v2: bool

    def open_entrances(self) -> list[int]:
        """Return descriptors that a process joins by writing ``0`` to each."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders]

    def cpu_seconds(self) -> float:
        """Return the time on cores of all that was ever in the group."""
        if self.is_v2:
            return int(_fields(self.folders[0] / "cpu.stat")["usage_usec"]) / 1e6
        (folder,) = (each for each in self.folders if (each / "cpuacct.usage").exists())
        return int((folder / "cpuacct.usage").read_text()) / 1e9

    def was_out_of_memory(self) -> bool:
        """Whether the kernel has killed one of its processes because the group's memory was spent."""
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        return any(
            int(_fields(folder / name).get("oom_kill", 0)) for folder in self.folders if (folder / name).exists()
        )

    def remove(self) -> None:
        """Remove the group when its processes have ended; what cannot be is left to the next start's sweep."""
        for folder in self.folders:
            for _ in range(_TRIES):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        break
                    time.sleep(_PAUSE_SECONDS)
                else:
                    break


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Makes groups; :func:`find_cgroups` finds out whether they can be made."""

    parents: tuple[Path, ...]
    is_v2: bool

    def make(self, memory_bytes: int) -> Cgroup:
        """Make the group of a program that may hold so much memory of all kinds. Raises OSError."""
        name = f"{_prefix()}{next(_numbers)}"
        group = Cgroup(tuple(parent / name for parent in self.parents), self.is_v2)
        try:
            for folder in group.folders:
                folder.mkdir()
                if self.is_v2:
                    _write(folder, {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1})
                elif (folder / "memory.limit_in_bytes").exists():
                    _write(folder, {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes})
        except BaseException:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove groups that processes of this namespace which are no more have left."""
        beginning = _prefix().rpartition("-")[0].rpartition("-")[0]
        for parent in self.parents:
            for folder in parent.glob(f"{beginning}-*-*"):
                pid = folder.name.split("-")[-2]
                if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                    with suppress(OSError):
                        folder.rmdir()


@cache
def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | str:
    """Return what makes groups below this process's own, or why none can be made; it makes and removes one."""
    try:
        own = _own_folders(proc)
        if all(name in own for name in _V1):
            found = Cgroups(tuple(dict.fromkeys(own[name] for name in _V1)), is_v2=False)
        elif "" in own:
            found = Cgroups((_delegated(own[""]),), is_v2=True)
        else:
            return "no control groups are mounted"
        found.sweep()
        group = found.make(1 << 30)
        try:
            for entrance in group.open_entrances():
                os.close(entrance)
            group.cpu_seconds()
        finally:
            group.remove()
    except (OSError, KeyError, ValueError) as error:
        return f"control groups cannot be made: {error}"
    return found


def _own_folders(proc: Path) -> dict[str, Path]:
    """Return the folder of this process's group by controller; version 2's is that of ``""``."""
    paths: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, Path] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, at = before.split()[3:5]
        kind, _, options = after.split()[:3]
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        for name in names:
            if name in paths and Path(paths[name]).is_relative_to(root):
                found.setdefault(name, Path(at) / Path(paths[name]).relative_to(root))
    return found


def _delegated(own: Path) -> Path:
    """Return the group in which others can be made and limited; such a group has no processes, so that we leave it.

    Raises OSError if it is not delegated, or others than this process are in the group.
    """
    if own.name.startswith("rollfeed-") and own.name.endswith("-main"):
        return own.parent
    wanted = {"memory", "cpu"}
    if wanted <= set((own / "cgroup.subtree_control").read_text().split()):
        return own
    if missing := wanted - set((own / "cgroup.controllers").read_text().split()):
        raise OSError(f"{own} has no {' and no '.join(sorted(missing))}")
    try:
        _write_one(own / "cgroup.subtree_control", "+memory +cpu")
    except OSError as error:
        if error.errno != errno.EBUSY or (own / "cgroup.procs").read_text().split() != [str(os.getpid())]:
            raise
        inner = own / f"{_prefix()}main"
        inner.mkdir(exist_ok=True)
        _write_one(inner / "cgroup.procs", str(os.getpid()))
        _write_one(own / "cgroup.subtree_control", "+memory +cpu")
    return own


def _prefix() -> str:
    """Return what names of this process's groups begin with: its process namespace and its number there."""
    return f"rollfeed-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-"


def _fields(path: Path) -> dict[str, str]:
    return {name: value for name, value in (line.split() for line in path.read_text().splitlines())}


def _write(folder: Path, values: Mapping[str, int]) -> None:
    """Set what there is; kernels without accounting of swap have no file for it."""
    for name, value in values.items():
        if (folder / name).exists():
            _write_one(folder / name, str(value))


def _write_one(path: Path, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
