"""Connections: few suffice, proxies have no say, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from rollfeed.engine.client import ServerEngine
from rollfeed.testing.fake_sglang import serve_fake_sglang, start_fake_sglang
from rollfeed.types import SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_new_tokens=16)
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


async def ask_many(engine: ServerEngine, count: int) -> None:
    completions = await asyncio.gather(*(engine.generate(PROMPT, PARAMS, request_id=f"r{i}") for i in range(count)))
    assert all(len(each.token_ids) == 16 for each in completions)


async def test_r32_2000_requests_through_4_connections_whatever_the_proxy_variables_say(
    engine_at: EngineAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        engine_at(fakes.address, concurrency=512, max_connections=4) as engine,
    ):
        await ask_many(engine, 2000)
        metrics = engine.metrics()
        assert metrics["requests"] == 2000
        assert metrics["retries"] == 0
        stats = await fakes.stats()
    assert stats["requests"]["/generate"] == 2000


async def test_long_responses_arrive_whole_beside_short_ones(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address, context_length=50_000) as engine:
        lengths = [1, 40_000, 2, 20_000, 3]
        completions = await asyncio.gather(
            *(
                engine.generate(PROMPT, SamplingParams(max_new_tokens=length), request_id=f"r{length}")
                for length in lengths
            )
        )
        assert [len(each.token_ids) for each in completions] == lengths
        for each in completions:
            assert (each.token_ids.dtype, each.logprobs.dtype) == (np.int32, np.float32)
            assert each.token_ids.nbytes + each.logprobs.nbytes == 8 * len(each.token_ids)


async def test_every_body_is_read_so_that_failures_cost_no_connections(engine_at: EngineAt) -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        engine_at(fakes.address, max_connections=2, max_tries=2) as engine,
    ):
        await fakes.add_fault("status", status=400, times=200)
        outcomes = await asyncio.gather(
            *(engine.generate(PROMPT, PARAMS, request_id=f"r{i}") for i in range(200)), return_exceptions=True
        )
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        await ask_many(engine, 10)


async def test_leaving_closes_every_socket_and_task(engine_at: EngineAt, until: Until) -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes:
        await ask_many_in_a_session(engine_at, fakes.addresses)  # imports and caches come with the first
        await fakes.stats()
        before = (num_descriptors(), len(asyncio.all_tasks()))
        await ask_many_in_a_session(engine_at, fakes.addresses)
        await fakes.stats()
        await until(lambda: num_descriptors() <= before[0] and len(asyncio.all_tasks()) <= before[1])


async def ask_many_in_a_session(engine_at: EngineAt, addresses: tuple[str, ...]) -> None:
    async with engine_at(*addresses) as engine:
        await ask_many(engine, 100)


@pytest.mark.soak
async def test_10000_requests_leave_descriptors_tasks_and_memory_where_they_were(engine_at: EngineAt) -> None:
    async with (
        start_fake_sglang(mode="zero") as fakes,
        engine_at(fakes.address, concurrency=128, probe_interval_seconds=5.0) as engine,
    ):
        measured = []
        for _ in range(5):
            for _ in range(4):
                await ask_many(engine, 500)
            gc.collect()
            await asyncio.sleep(4.0)  # idle connections are closed after three seconds
            measured.append((num_descriptors(), len(asyncio.all_tasks()), resident_bytes()))
        descriptors, tasks, memory = zip(*measured, strict=True)
        assert descriptors[-1] <= descriptors[0]
        assert tasks[-1] <= tasks[0]
        assert memory[-1] <= 1.05 * memory[0]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
