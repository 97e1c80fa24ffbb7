"""Servers behind routers of both dialects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing.fake_sglang import serve_fake_router, serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import SamplingParams, TensorUpdate

PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_new_tokens=4)
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.mark.parametrize("dialect", ["old", "new"])
async def test_requests_go_through_the_router(engine_at: EngineAt, dialect: str) -> None:
    async with (
        serve_fake_sglang(mode="zero", num_workers=3, router=dialect) as fakes,
        engine_at(router=fakes.router_address) as engine,
    ):
        assert engine.metrics()["live_workers"] == 3
        await asyncio.gather(*(engine.generate(PROMPT, PARAMS, request_id=f"r{i}") for i in range(60)))
        counts = [(await fakes.stats(worker))["requests"].get("/generate", 0) for worker in range(3)]
        assert sum(counts) == 60
        assert min(counts) > 0


@pytest.mark.parametrize("dialect", ["old", "new"])
async def test_r31_a_dead_server_leaves_the_router_and_comes_back_with_the_weights(
    scripted: Any, engine_at: EngineAt, until: Until, dialect: str
) -> None:
    async with scripted(2) as servers:
        addresses = [server.address for server in servers]
        async with serve_fake_router(addresses, dialect=dialect) as router, engine_at(router=router.address) as engine:
            await engine.apply(TensorUpdate({"w": np.zeros(2, np.float32)}, policy_version=3))
            lost, kept = servers
            await lost.kill()
            await until(lambda: engine.metrics()["live_workers"] == 1)
            completions = await asyncio.gather(
                *(engine.generate(PROMPT, PARAMS, request_id=f"r{i}") for i in range(20))
            )
            assert len(kept.requests) >= 20
            assert {span.policy_version for each in completions for span in each.version_spans} == {3}
            lost.version, lost.calls = "default", []
            await lost.start()
            await until(lambda: engine.metrics()["live_workers"] == 2)
            await asyncio.gather(*(engine.generate(PROMPT, PARAMS, request_id=f"s{i}") for i in range(40)))
            order = [path for path, _ in lost.calls if path in ("/generate", "/update_weights_from_disk")]
            assert order[0] == "/update_weights_from_disk"
            assert "/generate" in order


async def test_a_server_that_joins_the_router_is_watched(engine_at: EngineAt, until: Until, scripted: Any) -> None:
    async with (
        scripted(2) as servers,
        serve_fake_router([servers[0].address], dialect="new") as router,
        engine_at(router=router.address) as engine,
    ):
        async with engine_at(servers[1]) as other:  # any session will do to talk to the router
            reply = await other._http.control("POST", f"{router.address}/workers", {"url": servers[1].address})
        assert reply.status < 300
        await until(lambda: engine.metrics()["live_workers"] == 2)


async def test_a_server_under_router_is_refused(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes:
        with pytest.raises(EngineProtocolError, match=r"list it under engine\.sglang\.workers"):
            await engine_at(router=fakes.address).__aenter__()


@in_virtual_time
async def test_a_router_without_servers_is_told(engine_at: EngineAt) -> None:
    async with serve_fake_router([], dialect="new") as router:
        with pytest.raises(EngineUnavailableError, match="it lists no workers"):
            await engine_at(router=router.address, startup_timeout_seconds=0.3).__aenter__()
