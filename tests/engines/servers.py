"""Starts a real vLLM or SGLang on this machine's CPU, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
START_SECONDS = 420.0
"""Two cores that have other work need minutes to import and to load."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class RealServer:
    """A server on a port of its own, with what it needs to be started again there."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], *, port: int, log: Path) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._command = command
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        """Run it, with more flags, until it answers."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, *flags],
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _wait_until_healthy(self.address, self._process, self._log)

    def told(self, path: str) -> dict[str, Any]:
        """What it answers to GET."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.address + path, timeout=30) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def kill(self) -> None:
        """End it at once, with everything that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def python_of(server: str) -> Path:
    """The Python that has the server; without one there is nothing to test."""
    found = ROOT / f".venv-{server}" / "bin" / "python"
    if not found.exists():
        pytest.skip(f"no {server}: `make {server}` installs one into .venv-{server}")
    return found


@contextlib.contextmanager
def vllm_server(folder: Path, work: Path, *flags: str, dtype: str = "float32", **more: str) -> Iterator[RealServer]:
    """Serve a checkpoint folder with vLLM, as ``policy``, with the routes that change weights.

    ``more`` are variables of its environment.
    """
    python, port = python_of("vllm"), _free_port()
    environment = {
        **more,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
    }
    options = {
        "--served-model-name": "policy",
        "--port": str(port),
        "--dtype": dtype,
        "--max-model-len": "1024",
        "--max-num-seqs": "16",
        "--logprobs-mode": "processed_logprobs",
    }
    command = [str(python.parent / "vllm"), "serve", str(folder), "--host", "127.0.0.1", "--enforce-eager"]
    with _serving([*command, *_flat(options), *flags], port, environment, work / "vllm.log") as server:
        yield server


@contextlib.contextmanager
def sglang_server(folder: Path, work: Path, *flags: str) -> Iterator[RealServer]:
    """Serve a checkpoint folder with SGLang; one in fp32 is served in fp16 there, one in bf16 in bf16."""
    python, port = python_of("sglang"), _free_port()
    environment = {
        "PYTHONPATH": str(STAND_INS),
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
    options = {
        "--model-path": str(folder),
        "--port": str(port),
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--mem-fraction-static": "0.1",
        "--max-total-tokens": "20000",
    }
    command = [str(python), "-W", "ignore", "-m", "sglang.launch_server", "--host", "127.0.0.1"]
    command += ["--disable-overlap-schedule", *_flat(options), *flags]
    with _serving(command, port, environment, work / "sglang.log") as server:
        yield server


@contextlib.contextmanager
def _serving(command: Sequence[str], port: int, extra: dict[str, str], log: Path) -> Iterator[RealServer]:
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    server = RealServer(command, {**kept, "PYTHONPATH": "", **OFFLINE, **extra}, port=port, log=log)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with opener.open(f"{address}/health", timeout=30):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"{address} does not answer; the end of its log:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _flat(options: dict[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]
