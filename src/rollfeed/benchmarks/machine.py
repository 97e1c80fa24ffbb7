"""The machine that figures are measured on, and processes of this package there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import rollfeed


def machine() -> dict[str, Any]:
    """Return processor, cores, load and Python of this machine, as JSON values."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def command_environment() -> dict[str, str]:
    """Return the environment in which ``python -m rollfeed`` is this rollfeed."""
    source = str(Path(rollfeed.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])}


def start_rollfeed(
    arguments: Sequence[str], *, errors: IO[bytes] | int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own, of which nothing but its errors is kept."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollfeed", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=command_environment(),
    )
