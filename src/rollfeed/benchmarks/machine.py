"""The machine that figures are measured on, and processes of this package there."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import IO, Any

import rollfeed

_PORTS = (20_000, 32_000)
"""Below those that systems give to outgoing connections: nobody takes the port of a server while it is away."""


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


def is_listening(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def free_port() -> int:
    """Return a port that nobody listens at, and that no outgoing connection is given."""
    random = Random()  # of no seed: two benches at once must not meet
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
