"""Runs the driver of a fleet: everything of a run but its servers and sockets is real.

What is measured is this side: its processor time, its memory, how late it is, and what it makes of the servers' time.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from rollfeed.app import open_rollouts
from rollfeed.benchmarks.client_process import peak_bytes
from rollfeed.benchmarks.fleet.fleet_loop import FleetLoop
from rollfeed.benchmarks.fleet.fleet_servers import FleetServers
from rollfeed.benchmarks.fleet.fleet_workload import FleetWorkload
from rollfeed.benchmarks.fleet.reply_cost import reply_microseconds_per_token
from rollfeed.benchmarks.fleet.simulation_memory import simulation_megabytes
from rollfeed.benchmarks.schedule_workload import NumberedPrompts, QuickTokenizer
from rollfeed.config.engine import SGLangSettings, WeightUpdateMode
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.pipeline import Rollouts
from rollfeed.store import RunDirectory
from rollfeed.store.layout import STEP_FOLDERS, step_file
from rollfeed.types import FolderUpdate, StepCommit

_PATIENCE_SECONDS = 86_400.0
"""For a request: the longest response takes half an hour, and may have to begin again."""
_LAG_SECONDS = 0.05
"""Between two looks at how late the event loop is."""
_MILLION = 1e6


class _Engine(ServerEngine):
    """The SGLang client; tells which servers get requests."""

    def is_live(self, address: str) -> bool:
        """Whether a server gets requests."""
        return any(worker.is_live for worker in self._pool.workers if worker.address == address)


class _Run(NamedTuple):
    loop: FleetLoop
    servers: FleetServers
    engine: _Engine
    rollouts: Rollouts
    folder: Path


class _Reading(NamedTuple):
    """Everything that counts, at one moment."""

    at: float
    """By the loop's time."""
    all_seconds: float
    """Of the processor, by all threads."""
    loop_seconds: float
    """By the loop's own thread."""
    server_seconds: float
    generated_tokens: int
    sampled_tokens: int
    requests: int

    @classmethod
    def of(cls, run: _Run) -> _Reading:
        counters = run.engine.counters
        return cls(
            at=run.loop.time(),
            all_seconds=time.process_time(),
            loop_seconds=time.thread_time(),
            server_seconds=run.loop.work.seconds,
            generated_tokens=run.servers.generated_tokens,
            sampled_tokens=counters.sampled_tokens,
            requests=counters.requests,
        )


def bench_fleet(
    workload: FleetWorkload, *, warm_up_minutes: float, minutes: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run the workload and return JSON values.

    ``minutes`` of the fleet's time are measured, after those of the warm-up.
    """
    with asyncio.Runner(loop_factory=FleetLoop) as runner:
        return runner.run(_bench(workload, 60.0 * warm_up_minutes, 60.0 * minutes, progress))


async def _bench(
    workload: FleetWorkload, warm_up_seconds: float, seconds: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    began = time.monotonic()
    async with _open(workload) as run:
        lags = _Lags(run.loop)
        run.servers.let_die(run.engine.is_live)
        await _make(run, workload, run.loop.time() + warm_up_seconds, progress)
        before = _Reading.of(run)
        lags.start()
        with _Collections() as collections:
            batches = await _make(run, workload, before.at + seconds, progress)
        after = _Reading.of(run)
        metrics = dict(run.engine.metrics())
    peak, simulated = peak_bytes() / (1 << 20), simulation_megabytes(workload)
    return {
        **_figures(workload, before, after, batches),
        **lags.figures(),
        **collections.figures(),
        "peak_memory_mb": peak,
        "simulation_memory_mb": simulated,
        "driver_memory_mb": peak - simulated,
        "driver_kilobytes_per_request": 1024 * (peak - simulated) / workload.requests_at_servers,
        "utilisation": (after.generated_tokens - before.generated_tokens)
        / (run.servers.bound_tokens_per_second * (after.at - before.at)),
        "bound_tokens_per_second": run.servers.bound_tokens_per_second,
        "deaths": [each._asdict() for each in run.servers.recoveries],
        "engine": metrics,
        "reply_microseconds_per_token": reply_microseconds_per_token(),
        "wall_seconds": time.monotonic() - began,
        "workload": asdict(workload),
        "seed": workload.seed,
    }


@asynccontextmanager
async def _open(workload: FleetWorkload) -> AsyncIterator[_Run]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FleetLoop)
    async with AsyncExitStack() as stack:
        servers = FleetServers(workload, loop)
        addresses = await servers.start()
        stack.push_async_callback(servers.stop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfeed-bench-")))
        directory = stack.enter_context(RunDirectory.open(folder / "run", settings={}, identity={}, overwrite=False))
        settings = SGLangSettings(
            workers=tuple(addresses),
            concurrency=workload.requests_at_servers,
            max_connections=2 * workload.requests_at_servers,
            request_timeout_seconds=_PATIENCE_SECONDS,
            weight_update=WeightUpdateMode.IN_PLACE,
        )
        engine = _Engine(SGLang(settings), context_length=workload.context_length, tokenizer=QuickTokenizer())

        def commit(step: StepCommit) -> None:
            directory.commit(step, reward_key=None)
            for name in STEP_FOLDERS:  # a fleet fills a disk, and nobody reads here
                step_file(directory.path, name, step.batch.step - 1).unlink(missing_ok=True)

        rollouts = open_rollouts(
            workload.rollout_config(),
            source=NumberedPrompts(prompt_tokens=workload.prompt_tokens, seed=workload.seed),
            engine=engine,
            tokenizer=QuickTokenizer(),
            commit=commit,
            turns=directory.turns,
        )
        yield _Run(loop, servers, engine, await stack.enter_async_context(rollouts), folder)


async def _make(
    run: _Run, workload: FleetWorkload, until: float, progress: Callable[[str], None]
) -> list[tuple[int, int]]:
    """Make batches until a time, with new weights now and then; return the samples and response tokens of each."""
    batches: list[tuple[int, int]] = []
    published = run.loop.time()
    while (started := run.loop.time()) < until:
        batch = await run.rollouts.generate_batch()
        samples = batch.samples
        batches.append((len(samples), sum(sample.response_length for sample in samples)))
        progress(
            f"{run.loop.time() / 60.0:.1f} min: {batches[-1][1]} tokens in {run.loop.time() - started:.1f} s, "
            f"{int(run.engine.metrics()['requests_in_flight'])} requests in flight"
        )
        if workload.weight_updates and run.loop.time() >= published + workload.publish_seconds:
            published = run.loop.time()
            await run.engine.apply(FolderUpdate(run.folder, policy_version=run.engine.policy_version + 1))
    return batches


def _figures(
    workload: FleetWorkload, before: _Reading, after: _Reading, batches: list[tuple[int, int]]
) -> dict[str, Any]:
    seconds = after.at - before.at
    driver = after.all_seconds - before.all_seconds - (after.server_seconds - before.server_seconds)
    loop = after.loop_seconds - before.loop_seconds - (after.server_seconds - before.server_seconds)
    num_tokens = max(1, after.sampled_tokens - before.sampled_tokens)
    return {
        "servers": workload.num_engines,
        "requests_at_servers": workload.requests_at_servers,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "trained_tokens_per_second": sum(tokens for _, tokens in batches) / seconds,
        "samples_per_second": sum(samples for samples, _ in batches) / seconds,
        "driver_cores": driver / seconds,
        "driver_seconds_per_million_tokens": driver / num_tokens * _MILLION,
        "loop_seconds_per_million_tokens": loop / num_tokens * _MILLION,
        "driver_milliseconds_per_request": 1e3 * driver / max(1, after.requests - before.requests),
        "tokens_per_second_of_a_core": num_tokens / driver,
        "server_seconds": after.server_seconds - before.server_seconds,
    }


class _Collections:
    """The time that the garbage collector takes while the block runs; everything waits for it."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: list[float] = []

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.callbacks.remove(self._note)

    def figures(self) -> dict[str, float]:
        """Return the sum and the longest, in seconds of the processor."""
        return {"collector_seconds": sum(self._seconds), "collector_seconds_max": max(self._seconds, default=0.0)}

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._seconds.append(time.thread_time() - self._began)


class _Lags:
    """How late the event loop is."""

    def __init__(self, loop: FleetLoop) -> None:
        self._loop = loop
        self._late: list[float] = []

    def start(self) -> None:
        """Begin to look."""
        self._look(self._loop.time())

    def figures(self) -> dict[str, float]:
        """Return percentiles, in seconds."""
        p50, p99, most = np.percentile(self._late, (50, 99, 100)).tolist()
        return {"lag_seconds_p50": p50, "lag_seconds_p99": p99, "lag_seconds_max": most}

    def _look(self, due: float) -> None:
        now = self._loop.time()
        self._late.append(now - due)
        self._loop.call_at(now + _LAG_SECONDS, self._look, now + _LAG_SECONDS)
