"""The cores that this process may keep busy."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP_2_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_1_LIMIT = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def num_cores() -> int:
    """Return how many cores this process may run on, two hyperthreads counted as two."""
    return len(_cpus())


def num_physical_cores() -> int:
    """Return the physical cores open to this process, at least 1.

    Two hyperthreads of a core count once: they share its arithmetic units. CPU affinity and the
    limit of a container count too.
    """
    cores = len({_siblings(cpu) for cpu in _cpus()})
    limit = _container_limit()
    return max(1, cores if math.isinf(limit) else min(cores, math.ceil(limit)))


def _cpus() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _siblings(cpu: int) -> str:
    path = _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return _read(path) or str(cpu)


def _container_limit() -> float:
    """Return how many CPUs' worth of time the container gets; infinity without a limit."""
    quota, _, period = _read(_CGROUP_2_LIMIT).partition(" ")
    if not period:
        quota, period = (_read(path) for path in _CGROUP_1_LIMIT)
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return math.inf
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def wait_without_spinning() -> None:
    """Make torch's threads sleep while they wait for each other; call it before torch is imported.

    By default they spin, and on a machine with other work two spinning threads decode ten times
    slower than one. A policy set by the user stays; torch reads it only when it is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
