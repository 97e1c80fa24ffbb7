"""``rollfeed serve engine`` as a process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.held_ports import held_port

import rollfeed

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def free_ports() -> Iterator[int]:
    """The first of two ports that nobody else can listen on meanwhile, nor is given where any will do."""
    with contextlib.ExitStack() as held:
        while True:
            port = random.randrange(20_000, 30_000)
            with contextlib.suppress(OSError):
                for each in (port, port + 1):
                    held.enter_context(held_port(each))
                break
        yield port


@pytest.fixture
def serving(start_rollfeed: Callable[..., Any]) -> Callable[..., Any]:
    return partial(start_rollfeed, "serve", "engine", "--threads", "1")


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    source = str(Path(rollfeed.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": source},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ask(port: int, path: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, JSON), timeout=300) as response:
        return bytes(response.read())


def until_healthy(process: Any, port: int) -> None:
    while True:
        assert process.poll() is None
        with contextlib.suppress(OSError):
            ask(port, "/health")
            return
        time.sleep(0.1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_it_is_told_to_end(
    serving: Callable[..., Any], tiny_checkpoint: Path, free_ports: int, number: int, code: int
) -> None:
    process = serving("--model", str(tiny_checkpoint), "--port", str(free_ports))
    until_healthy(process, free_ports)
    body = {"input_ids": [72, 101], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    assert len(json.loads(ask(free_ports, "/generate", body))["output_ids"]) == 3
    process.send_signal(number)
    assert process.wait(timeout=120) == code
    assert process.read().strip() == f"serving tiny at http://127.0.0.1:{free_ports}"


def test_what_runs_is_answered_with_its_partial_output_when_the_server_ends(
    serving: Callable[..., Any], tiny_checkpoint: Path, free_ports: int
) -> None:
    process = serving("--model", str(tiny_checkpoint), "--port", str(free_ports), "--num-slots", "1")
    until_healthy(process, free_ports)
    # One after the other, so that the last one has not begun when the first token of the first one comes.
    sampling = {"max_new_tokens": 1000, "ignore_eos": True, "n": 60}
    body = json.dumps({"input_ids": [72], "sampling_params": sampling, "stream": True}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(
        urllib.request.Request(f"http://127.0.0.1:{free_ports}/generate", body, JSON), timeout=300
    ) as response:
        response.readline()
        process.send_signal(signal.SIGTERM)
        *_, last, done, _ = response.read().decode().split("\n\n")
    assert json.loads(last.strip().removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "data: [DONE]"
    assert process.wait(timeout=120) == 0


def test_several_workers_serve_consecutive_ports_and_end_together(
    serving: Callable[..., Any], tiny_checkpoint: Path, free_ports: int
) -> None:
    process = serving("--model", str(tiny_checkpoint), "--port", str(free_ports), "--workers", "2")
    for port in (free_ports, free_ports + 1):
        until_healthy(process, port)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    for port in (free_ports, free_ports + 1):
        with pytest.raises(OSError, match="refused"):
            ask(port, "/health")


BROKEN_DEVICE = """
import sys
from rollfeed.cli.main import main
from rollfeed.engine.backends.batching import ContinuousBatcher
def step(self, between_tokens): raise {error}("the device is broken")
ContinuousBatcher.step = step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_x01_a_server_whose_engines_thread_is_dead_answers_and_ends_with_the_reason(
    tiny_checkpoint: Path, free_ports: int, error: str
) -> None:
    arguments = ("serve", "engine", "--threads", "1", "--model", str(tiny_checkpoint), "--port", str(free_ports))
    with running("-c", BROKEN_DEVICE.format(error=error), *arguments) as process:
        until_healthy(process, free_ports)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            ask(free_ports, "/generate", {"input_ids": [72]})
        assert process.wait(timeout=120) == 1
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == (
            f"rollfeed: the engine's thread failed: {error}: the device is broken"
        )


def test_a_taken_port_is_told_in_one_line(serving: Callable[..., Any], tiny_checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = serving("--model", str(tiny_checkpoint), "--port", str(port))
        assert process.wait(timeout=120) == 2
        assert process.read().startswith(f"rollfeed: port = {port}: cannot listen on 127.0.0.1:{port}")
