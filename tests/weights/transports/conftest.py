"""Real servers of the embedded engine, in processes of their own, and engines that publish to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.held_ports import held_port

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.prompts.tokenizer import load_tokenizer
from rollfeed.protocols import TransportContext, WeightTransport


class ServerProcess:
    """`rollfeed serve engine`, which can be killed and started again on its port."""

    def __init__(self, checkpoint: Path, port: int) -> None:
        self._checkpoint = checkpoint
        self._port = port
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        words = ["serve", "engine", "--model", str(self._checkpoint), "--port", str(self._port), "--threads", "1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollfeed", *words, "--context-length", "256", "--num-slots", "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if f"{self.address}\n" in line:
                return
        raise AssertionError("the server ended")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    with held_port() as port:
        process = ServerProcess(tiny_checkpoint, port)
        yield process
        process.kill()


@pytest.fixture
def engine_of(tiny_checkpoint: Path) -> Callable[..., ServerEngine]:
    """Make an engine for servers that get weights by a transport."""

    def make(*addresses: str, transport: WeightTransport, **changes: object) -> ServerEngine:
        settings = SGLangSettings.model_validate(
            {
                "workers": addresses,
                "concurrency": 16,
                "probe_interval_seconds": 0.2,
                "probe_timeout_seconds": 60.0,
                "weight_update": "retract",
                **changes,
            }
        )
        tokenizer = load_tokenizer(tiny_checkpoint)
        return ServerEngine(SGLang(settings), context_length=200, tokenizer=tokenizer, transport=transport)

    return make


@pytest.fixture
def context(tiny_checkpoint: Path) -> TransportContext:
    return TransportContext(kind="sglang", folder=None, checkpoint=tiny_checkpoint, untied_head=False)
