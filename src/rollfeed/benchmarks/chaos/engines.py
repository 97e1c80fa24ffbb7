"""Fake SGLang servers for ``rollfeed bench chaos``: each a process of its own, killed and started again at its port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

import rollfeed
from rollfeed.errors import EngineUnavailableError

_PORTS = (20_000, 32_000)
"""Below those that systems give to outgoing connections: nobody takes the port of an engine while it is away."""
_START_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_TIME_MODEL = ("--num-slots", "32", "--step-ms", "1.5", "--median-length", "40", "--max-length", "120")


def command_environment() -> Mapping[str, str]:
    """Return the environment in which ``python -m rollfeed`` is this rollfeed."""
    source = str(Path(rollfeed.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


class ChaosEngine:
    """One server. Entering starts it, leaving kills it."""

    def __init__(self) -> None:
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens, whenever it does."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> ChaosEngine:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server, and do not wait for it."""
        command = [sys.executable, "-m", "rollfeed", "serve", "fake-sglang", "--mode", "time-model"]
        self._process = subprocess.Popen(
            [*command, "--port", str(self._port), *_TIME_MODEL],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=command_environment(),
        )

    def wait_until_ready(self) -> None:
        """Return when the server listens; it is started again when it could not.

        Raises:
            EngineUnavailableError: If it does not within a minute.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not self._listens():
            if time.monotonic() > deadline:
                raise EngineUnavailableError(f"the fake engine at {self.address} is not there: {_START_SECONDS:g} s")
            if self._process is None or self._process.poll() is not None:
                self.start()
            time.sleep(_RETRY_SECONDS)

    def kill(self) -> None:
        """Kill the server and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False


def _free_port() -> int:
    random = Random()  # of no seed: two benches at once must not meet
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
