"""Servers of the embedded engine and a router over them, each a process, asked as clients do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rollfeed

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.05
NOWHERE = "http://127.0.0.1:9"
"""A proxy that nobody runs, so that nothing leaves this machine."""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    return {**kept, **proxies, "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}


def ask(address: str, path: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=DEADLINE_SECONDS) as response:
        text: str = response.read().decode()
    return text


def generate(address: str, **body: Any) -> Any:
    return json.loads(ask(address, "/generate", {"return_logprob": True, **body}))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        with contextlib.suppress(OSError):  # not listening yet
            if condition():
                return
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(POLL_SECONDS)


def healthy_workers(router: str) -> set[str]:
    return {worker["url"] for worker in json.loads(ask(router, "/workers"))["workers"] if worker["is_healthy"]}


def num_ended(worker: str) -> int:
    """How many requests a worker has answered."""
    lines = ask(worker, "/metrics").splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("rollfeed_engine_requests_total{"))


class ServingProcess:
    """A ``rollfeed serve`` in a process of its own, on a port that it found free."""

    def __init__(self, *words: str, says: str) -> None:
        self._says = says
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollfeed", "serve", *words], env=environment(), stderr=subprocess.PIPE, text=True
        )

    def address(self) -> str:
        """Where it listens; waits until it does."""
        assert self.process.stderr is not None
        before = ""  # what it says of the machine
        for line in self.process.stderr:
            if line.startswith(self._says):
                return line.split()[-1]
            before += line
        raise AssertionError(before)

    def end(self) -> str:
        """End it and return what it has logged since it listened."""
        self.process.terminate()
        try:
            return self.process.communicate(timeout=DEADLINE_SECONDS)[1]
        finally:
            self.process.kill()


class Worker(ServingProcess):
    """A server of the embedded engine."""

    def __init__(self, checkpoint: Path, *options: str) -> None:
        words = ("engine", "--model", str(checkpoint), "--port", "0", "--threads", "1", "--num-slots", "8")
        super().__init__(*words, *options, says="serving tiny at http://127.0.0.1:")


class RouterProcess(ServingProcess):
    """Our router."""

    def __init__(self, *words: str, port: int = 0) -> None:
        super().__init__("router", "--port", str(port), *words, says="routing to ")
