"""The embedded engine's server beside others on the same CPU: vLLM and llama.cpp, each as its users start it.

All compute in float32 with the same number of threads, and are asked over HTTP by the same client for the same
numbers of tokens, in turn: all of a workload at once, and one response alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from rollfeed.app import Model
from rollfeed.benchmarks.engine import EngineWorkload, prompts_of
from rollfeed.benchmarks.machine import free_port
from rollfeed.engine.gguf import write_float32
from rollfeed.errors import ConfigError

_START_SECONDS = 600.0
_POLL_SECONDS = 0.5
_CONTEXT_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerKind:
    """A server, how to start it and how to ask it."""

    name: str
    command: Sequence[str]
    """``{port}`` in it is replaced."""
    environment: Mapping[str, str]
    path: str
    body: Callable[[list[int], int], dict[str, Any]]
    """What asks for so many tokens after a prompt, none of which ends the response."""


def bench_servers(
    model: Model,
    *,
    gguf_file: Path | None,
    vllm_python: Path | None,
    llama_server: Path | None,
    threads: int,
    workload: EngineWorkload,
    progress: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Return tokens per second by batch (``32``, ``1``) and server; the median over the repetitions.

    llama.cpp needs the GGUF file that the model came from. One response alone is of the first prompt.

    Raises:
        ConfigError: If a server is not there, cannot be started, or serves no such model.
    """
    with tempfile.TemporaryDirectory(prefix="rollfeed-bench-") as name, ExitStack() as stack:
        kinds = [_rollfeed(model, threads, workload)]
        if vllm_python is not None:
            kinds.append(_vllm(model, vllm_python, threads, workload))
        if llama_server is not None:
            if gguf_file is None:
                raise ConfigError("--llama-cpp: needs a model from a GGUF file, as the built-in one is")
            copy = Path(name, "float32.gguf")
            write_float32(gguf_file, copy)
            kinds.append(_llama_cpp(copy, llama_server, threads, workload))
        addresses = {kind: stack.enter_context(_serving(kind, Path(name))) for kind in kinds}
        return asyncio.run(_measure(addresses, model, workload, progress))


async def _measure(
    addresses: Mapping[ServerKind, str], model: Model, workload: EngineWorkload, progress: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    prompts = [prompt.tolist() for prompt in prompts_of(model, workload)]
    batches = {
        str(len(prompts) * workload.n_samples_per_prompt): prompts * workload.n_samples_per_prompt,
        "1": prompts[:1],
    }
    rates: dict[str, dict[str, list[float]]] = {size: {kind.name: [] for kind in addresses} for size in batches}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        for kind, address in addresses.items():
            await _ask(session, kind, address, prompts[:1], 2)
        for _ in range(workload.repetitions):
            for size, asked in batches.items():
                for kind, address in addresses.items():
                    started = time.perf_counter()
                    await _ask(session, kind, address, asked, workload.new_tokens)
                    rate = len(asked) * workload.new_tokens / (time.perf_counter() - started)
                    rates[size][kind.name].append(rate)
                    progress(f"{size} at once, {kind.name}: {rate:.0f} tokens/s")
    return {size: {name: median(found) for name, found in by_name.items()} for size, by_name in rates.items()}


async def _ask(
    session: aiohttp.ClientSession, kind: ServerKind, address: str, prompts: Sequence[list[int]], num_tokens: int
) -> None:
    async def ask(prompt: list[int]) -> None:
        async with session.post(address + kind.path, json=kind.body(prompt, num_tokens)) as reply:
            content = await reply.json()
        usage = content.get("usage", {})
        made = usage.get("completion_tokens", content.get("tokens_predicted"))
        if reply.status != 200 or made != num_tokens:
            raise ConfigError(f"{kind.name}: {made} tokens of {num_tokens}: HTTP {reply.status}: {content}"[:300])

    await asyncio.gather(*(ask(prompt) for prompt in prompts))


def _completions(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    lengths = {"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
    return {"prompt": prompt, "temperature": 1.0, "top_p": 1.0, "top_k": -1, **lengths}


def _rollfeed(model: Model, threads: int, workload: EngineWorkload) -> ServerKind:
    slots = workload.num_groups * workload.n_samples_per_prompt
    options = ["--threads", str(threads), "--num-slots", str(slots), "--context-length", str(_CONTEXT_LENGTH)]
    serve = [sys.executable, "-m", "rollfeed", "serve", "engine", "--model", str(model.checkpoint), "--port", "{port}"]
    return ServerKind(
        name="rollfeed", command=[*serve, *options], environment={}, path="/v1/completions", body=_completions
    )


def _vllm(model: Model, python: Path, threads: int, workload: EngineWorkload) -> ServerKind:
    slots = workload.num_groups * workload.n_samples_per_prompt
    serve = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model.checkpoint), "--port", "{port}"]
    options = ["--served-model-name", "policy", "--dtype", "float32", "--max-model-len", str(_CONTEXT_LENGTH)]
    return ServerKind(
        name="vllm",
        command=[*serve, "--host", "127.0.0.1", *options, "--max-num-seqs", str(slots)],
        environment={
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        },
        path="/v1/completions",
        body=lambda prompt, num_tokens: {**_completions(prompt, num_tokens), "model": "policy"},
    )


def _llama_cpp(gguf_file: Path, binary: Path, threads: int, workload: EngineWorkload) -> ServerKind:
    slots = workload.num_groups * workload.n_samples_per_prompt
    sizes = ["--threads", str(threads), "--parallel", str(slots), "--ctx-size", str(slots * _CONTEXT_LENGTH)]

    def body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"]}
        return {"prompt": prompt, "n_predict": num_tokens, "ignore_eos": True, "cache_prompt": False, **sampling}

    return ServerKind(
        name="llama.cpp",
        command=[str(binary), "--model", str(gguf_file), "--host", "127.0.0.1", "--port", "{port}", *sizes],
        environment={},
        path="/completion",
        body=body,
    )


@contextlib.contextmanager
def _serving(kind: ServerKind, folder: Path) -> Iterator[str]:
    port, log = free_port(), folder / f"{kind.name}.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                [word.format(port=port) for word in kind.command],
                env={**os.environ, **kind.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{kind.name}: cannot be started: {error}") from error
    try:
        address = f"http://127.0.0.1:{port}"
        reason = asyncio.run(_until_healthy(address, process))
        if reason is not None:
            end = " ".join(log.read_text(errors="replace")[-300:].split())
            raise ConfigError(f"{kind.name}: does not answer ({reason}); the end of its log: {end}")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and has not ended


async def _until_healthy(address: str, process: subprocess.Popen[bytes]) -> str | None:
    """Return why a server does not get there, or None when it has."""
    last = "no answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as session:
            while process.poll() is None:
                try:
                    async with session.get(address + "/health") as reply:
                        if reply.status == 200:
                            return None
                        last = f"HTTP {reply.status}"
                except aiohttp.ClientError as error:
                    last = str(error)
                await asyncio.sleep(_POLL_SECONDS)
    return f"{last}; it ended" if process.poll() is not None else f"{last}, for {_START_SECONDS:g} s"
