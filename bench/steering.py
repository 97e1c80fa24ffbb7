"""Throughput of servers whose memory is short, by what bounds the requests at them.

The client is the real one, over loopback to fake servers: their model of time, with memory for keys and values,
prefixes held in it, and requests put back when it is full. Time is virtual: it jumps to the next timer when nothing
is under way, so that minutes take seconds and a busy machine changes nothing. Run it with::

    python bench/steering.py --out bench/steering.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from rollfeed.benchmarks.machine import machine
from rollfeed.benchmarks.schedule_workload import QuickTokenizer
from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.client.replies import ServerLoad
from rollfeed.engine.dialects import SGLang
from rollfeed.routing import belonging
from rollfeed.testing.fake_sglang import FakeMode, Fakes, FakeSettings, TimeModelSettings, serve_fake_sglang
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions of one turn or several, so many at a time, each of which is followed by another one."""

    name: str
    num_engines: int = 2
    num_slots: int = 128
    kv_budget_tokens: int = 100_000
    in_flight: int = 300
    """Sessions at a time."""
    starts_together: bool = False
    """Whether new ones begin when all have ended, as in steps, or one when one has ended."""
    prompt_tokens: int = 150
    median_length: float = 1_500.0
    max_length: int = 8_192
    num_turns: int = 1
    tool_seconds: float = 0.0
    """Median of a lognormal (sigma 1), between two turns."""
    prefill_us_per_token: float = 20.0
    tool_tokens: int = 400
    """That a tool adds to the conversation."""
    seed: int = 0

    @property
    def fake_settings(self) -> FakeSettings:
        return FakeSettings(
            mode=FakeMode.TIME_MODEL,
            num_workers=self.num_engines,
            time_model=TimeModelSettings(
                num_slots=self.num_slots,
                kv_budget_tokens=self.kv_budget_tokens,
                prefix_cache=True,
                median_length=self.median_length,
                max_length=self.max_length,
                seed=self.seed,
                page_tokens=16,
                prefill_us_per_token=self.prefill_us_per_token,
            ),
            context_length=1 << 20,
            keep_requests=0,
        )


AGENTS: dict[str, Any] = {"in_flight": 160, "num_turns": 10, "median_length": 300.0, "max_length": 2_048}
WORKLOADS = (
    Workload(name="answers"),
    Workload(name="answers, slow prefill", prefill_us_per_token=80.0),
    Workload(name="answers in steps", starts_together=True),
    Workload(name="agents, slow tools", tool_seconds=8.0, **AGENTS),
    Workload(name="agents, quick tools, slow prefill", tool_seconds=1.0, prefill_us_per_token=80.0, **AGENTS),
)
WAYS = ("found", "conversations not known", "nothing put back", "memory not asked for")
"""To find the number of requests: as the client does, and without some of it."""
FIXED = (48, 64, 80, 96, 128, 256)
"""Requests at all servers together, among which the best fixed number is looked for."""


async def play(engine: ServerEngine, workload: Workload, number: int, done: list[float], *, is_known: bool) -> None:
    """Play one session."""
    random = Random(f"{workload.seed}/{number}")
    ids = np.array([random.randrange(1000, 20_000) for _ in range(workload.prompt_tokens)], np.int32)
    for turn in range(workload.num_turns):
        params = SamplingParams(max_new_tokens=workload.max_length, seed=number)
        with belonging(session=f"session{number}" if is_known and workload.num_turns > 1 else None):
            completion = await engine.generate(ids, params, request_id=f"session{number}-turn{turn}")
        told = [random.randrange(1000, 20_000) for _ in range(workload.tool_tokens)]
        ids = np.concatenate([ids, completion.token_ids, np.array(told, np.int32)])
        if turn + 1 < workload.num_turns:
            await asyncio.sleep(workload.tool_seconds * math.exp(random.gauss(0.0, 1.0)))
    done.append(asyncio.get_running_loop().time())


async def measure(workload: Workload, way: str, concurrency: int | None, *, minutes: float) -> dict[str, Any]:
    """Return the figures of so many minutes of virtual time, without the first fifth."""
    began = time.process_time()
    async with serve_fake_sglang(workload.fake_settings) as fakes:
        settings = SGLangSettings(workers=fakes.addresses, concurrency=concurrency)
        dialect, limits = SGLang(settings), []
        done: list[float] = []
        if way == "memory not asked for":
            tell = dialect.load
            dialect.load = lambda address: without_memory(tell(address))  # type: ignore[method-assign]
        parts: dict[str, Any] = {
            "context_length": 1 << 20,
            "tokenizer": QuickTokenizer(),
            "puts_back": way != "nothing put back",
        }
        async with ServerEngine(dialect, **parts) as engine:
            is_known = way != "conversations not known"
            playing = asyncio.create_task(supply(engine, workload, done, is_known=is_known))
            await asyncio.sleep(12.0 * minutes)
            before, from_done = await totals(fakes), len(done)
            for _ in range(48):
                await asyncio.sleep(minutes)
                limits.append(engine.metrics()["concurrency_limit"])
            after, num_done = await totals(fakes), len(done) - from_done
            metrics = engine.metrics()
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
    seconds = 48.0 * minutes
    told = {name: round((after[name] - before[name]) / seconds, 3) for name in after}
    return {
        "tokens_per_second": told.pop("generated_tokens"),
        "sessions_per_minute": num_done / seconds * 60.0,
        **{f"{name}_per_second": value for name, value in told.items()},
        "limits": sorted(limits)[:: len(limits) // 4],
        "client": {name: value for name, value in metrics.items() if name in KEPT},
        "cpu_seconds": round(time.process_time() - began, 1),
    }


KEPT = ("requests", "redispatched_requests", "resumed_requests", "put_back_requests", "timed_out_requests")


async def totals(fakes: Fakes) -> dict[str, float]:
    """Return what all servers have done so far."""
    usages = [server.backend.usage() for server in fakes.servers]
    models: list[Any] = [server.backend for server in fakes.servers]
    return {
        "generated_tokens": sum(usage.generated_tokens for usage in usages),
        "retractions": sum(model.num_retractions for model in models),
        "prefill_seconds": sum(usage.prefill_seconds for usage in usages),
    }


async def without_memory(told: Awaitable[ServerLoad | None]) -> ServerLoad | None:
    """Return what a server says of its load, without its memory."""
    load = await told
    return None if load is None else load._replace(kv_use=None, num_preempted=0, recompute_seconds=None)


async def supply(engine: ServerEngine, workload: Workload, done: list[float], *, is_known: bool) -> None:
    """Keep so many sessions going."""
    number = 0
    playing: set[asyncio.Task[None]] = set()
    try:
        while True:
            while len(playing) < workload.in_flight:
                playing.add(asyncio.create_task(play(engine, workload, number, done, is_known=is_known)))
                number += 1
            when = asyncio.ALL_COMPLETED if workload.starts_together else asyncio.FIRST_COMPLETED
            ended, playing = await asyncio.wait(playing, return_when=when)
            for task in ended:
                task.result()
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def main() -> None:
    """Measure every way to bound the requests with every workload, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", nargs="+", default=[each.name for each in WORKLOADS])
    parser.add_argument("--way", nargs="+", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--fixed", type=int, nargs="*", default=list(FIXED), help="numbers that are given")
    parser.add_argument("--minutes", type=float, default=15.0, help="of virtual time")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    rows = []
    for workload in WORKLOADS:
        if workload.name not in arguments.workload:
            continue
        for way, concurrency in [
            *((way, None) for way in arguments.way),
            *(("given", each) for each in arguments.fixed),
        ]:
            row = run_in_virtual_time(measure(workload, way, concurrency, minutes=arguments.minutes))
            rows.append({"workload": workload.name, "way": way, "concurrency": concurrency, **row})
            print(json.dumps(rows[-1]), flush=True)
    figures = {
        "rows": rows,
        "workloads": [asdict(each) for each in WORKLOADS],
        "minutes": arguments.minutes,
        "command": "python bench/steering.py --out bench/steering.json",
        "machine": machine(),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
