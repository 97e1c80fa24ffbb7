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
from typing import Any, Self

import rollfeed

_PORTS = (20_000, 32_000)
"""Below those that systems give to outgoing connections: nobody takes the port of a server while it is away."""
_LAST_WORDS = 2_000
"""Characters at the end of a log."""


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


class CommandProcess:
    """A command of rollfeed in a process of its own, started any number of times; leaving the block kills it.

    Of what it says only the errors are kept, in ``log`` where there is one.
    """

    def __init__(self, arguments: Sequence[object], *, log: Path | None = None) -> None:
        self._command = [sys.executable, "-m", "rollfeed", *map(str, arguments)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process started last."""
        assert self._process is not None, "not started"
        return self._process

    @property
    def has_ended(self) -> bool:
        """Whether it has come to its own end, well or not."""
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        with open(self._log or os.devnull, "ab") as errors:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=command_environment(),
            )

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """Return the end of its log."""
        if self._log is None or not self._log.exists():
            return ""
        return self._log.read_text(errors="replace")[-_LAST_WORDS:].strip()


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
