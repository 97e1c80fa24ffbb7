"""Several vLLM servers are one engine: requests are spread, and go elsewhere when one of them fails."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.engine.client.replies import ServerLoad
from rollfeed.routing import belonging
from rollfeed.types import FinishKind, TensorUpdate

PROMPT = np.array([112, 113, 114], np.int32)
TENSORS = {"a": np.ones((2, 2), np.float32)}
FAST = {"probe_interval_seconds": 0.05, "probe_timeout_seconds": 20.0}


def prompts(count: int) -> list[Any]:
    return [np.array([97 + number % 26, 97 + number // 26], np.int32) for number in range(count)]


async def gone(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_requests_are_spread_and_those_of_one_prompt_meet(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm() as one, vllm() as other, engine_at(one, other) as engine:
        await asyncio.gather(*(engine.generate(ids, asked(2), request_id="x") for ids in prompts(100)))
        assert min(len(one.bodies), len(other.bodies)) > 20
        before = len(one.bodies), len(other.bodies)
        with belonging(group="of one prompt"):
            await asyncio.gather(*(engine.generate(PROMPT, asked(2, seed=i), request_id="x") for i in range(8)))
        assert 8 in (len(one.bodies) - before[0], len(other.bodies) - before[1])


async def test_what_a_dead_server_had_goes_on_elsewhere_from_its_tokens(
    vllm: Any, engine_at: Any, asked: Any, until: Any, rescored: Any
) -> None:
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(vllm()) for _ in range(2)]
        engine = await stack.enter_async_context(engine_at(one, other, **FAST))
        one.hold_after = other.hold_after = 3
        with belonging(group="of one prompt"):
            tasks = [asyncio.create_task(engine.generate(PROMPT, asked(), request_id=str(i))) for i in range(4)]
        await until(lambda: engine.metrics()["tokens_in_flight"] == 12)
        sick, well = (one, other) if one.holding else (other, one)
        sick.handle = gone
        well.hold_after = None
        await until(lambda: engine.metrics()["live_workers"] == 1)
        completions = await asyncio.gather(*tasks)
        for completion in completions:
            assert completion.finish_reason.kind is FinishKind.LENGTH
            expected = rescored(PROMPT.tolist(), completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert {len(body["token_ids"]) for body in well.bodies} == {6}
        assert engine.metrics()["resumed_requests"] == 4
        assert engine.metrics()["closed_requests"] == 4
        assert engine.metrics()["orphans"] == 0


@pytest.mark.parametrize("names", [True, False])
async def test_a_server_comes_back_with_the_published_weights_before_it_is_asked(
    vllm: Any, engine_at: Any, asked: Any, until: Any, names: bool
) -> None:
    version = "default" if names else None
    async with AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(vllm(weight_version=version)) for _ in range(2)]
        engine = await stack.enter_async_context(engine_at(one, other, **FAST))
        await engine.apply(TensorUpdate(TENSORS, policy_version=5))
        assert (one.weight_version, other.weight_version) == (("5", "5") if names else (None, None))
        healthy, one.handle = one.handle, gone
        await until(lambda: engine.metrics()["live_workers"] == 1)
        one.weight_version, one.calls, one.requests = version, [], []
        one.handle = healthy
        await until(lambda: engine.metrics()["live_workers"] == 2)
        assert "/collective_rpc" in [path for path, _ in one.calls]
        assert one.requests == []
        completions = await asyncio.gather(*(engine.generate(ids, asked(2), request_id="x") for ids in prompts(60)))
        assert one.requests
        assert {span.policy_version for each in completions for span in each.version_spans} == {5}
        assert engine.metrics()["readmitted_workers"] == 1


async def test_an_update_that_one_server_fails_takes_that_one_out(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(update_status=500) as one, vllm() as other, engine_at(one, other) as engine:
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        await asyncio.gather(*(engine.generate(ids, asked(2), request_id="x") for ids in prompts(40)))
        assert one.bodies == []
        assert engine.metrics()["live_workers"] == 1


async def test_of_servers_at_different_versions_the_newest_answer(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(weight_version="1") as one, vllm(weight_version="2") as other, engine_at(one, other) as engine:
        assert engine.policy_version == 2
        await asyncio.gather(*(engine.generate(ids, asked(), request_id="x") for ids in prompts(8)))
        assert (len(one.bodies), len(other.bodies)) == (0, 8)


async def test_an_abort_of_all_reaches_every_server(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm(hold_after=1) as one, vllm(hold_after=1) as other, engine_at(one, other) as engine:
        tasks = [asyncio.create_task(engine.generate(ids, asked(), request_id="x")) for ids in prompts(20)]
        await until(lambda: engine.metrics()["tokens_in_flight"] == 20)
        assert min(one.holding, other.holding) > 0
        await engine.abort()
        assert {(await task).finish_reason.kind for task in tasks} == {FinishKind.ABORT}
        await until(lambda: one.closed + other.closed == 20)


async def test_the_number_of_requests_is_found_from_what_servers_say_of_their_load(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    async with vllm(hold_after=1) as server, engine_at(server, max_concurrency=512) as engine:
        assert engine.max_running_requests == 512
        assert engine.metrics()["concurrency_limit"] == 64
        server.gauges = (8, 56)
        tasks = [asyncio.create_task(engine.generate(ids, asked(2), request_id="x")) for ids in prompts(100)]
        await until(lambda: server.holding == 64)
        assert tuple(await engine.load()) == (8, 56 + 36)
        server.hold_after = None
        server.release.set()
        await asyncio.gather(*tasks)
        await until(lambda: engine.metrics()["concurrency_limit"] < 64)


async def test_what_a_server_says_of_its_memory_is_read(vllm: Any, engine_at: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        dialect: Any = engine._dialect
        server.gauges = (8, 2)
        assert await dialect.load(server.address) == ServerLoad(8, 2)
        server.memory = [("gpu_cache_usage_perc", 0.25)]
        assert (await dialect.load(server.address)).kv_use == 0.25
        server.memory = [("kv_cache_usage_perc", 0.5), ("kv_cache_usage_perc", 9e-1), ("num_preemptions_total", 7)]
        assert await dialect.load(server.address) == ServerLoad(8, 2, kv_use=0.9, total_preempted=7)


async def test_what_is_put_back_is_no_failure_and_goes_on_from_its_tokens(
    vllm: Any, engine_at: Any, asked: Any, until: Any, rescored: Any
) -> None:
    async with vllm(hold_after=3) as server, engine_at(server) as engine:
        tasks = [asyncio.create_task(engine.generate(ids, asked(), request_id="x")) for ids in prompts(4)]
        await until(lambda: engine.metrics()["tokens_in_flight"] == 12)
        server.hold_after = None
        for flight in engine._flights:
            flight.is_put_back = True
            flight.interrupt()
        completions = await asyncio.gather(*tasks)
        for ids, completion in zip(prompts(4), completions, strict=True):
            expected = rescored(ids.tolist(), completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        metrics = engine.metrics()
        assert metrics["put_back_requests"] == metrics["resumed_requests"] == 4
        assert metrics["retries"] == metrics["redispatched_requests"] == 0


@pytest.mark.parametrize("purpose", ["training", "evaluation"])
def test_only_exact_tokens_are_put_back(engine_at: Any, purpose: str) -> None:
    engine = engine_at("http://127.0.0.1:1", purpose=purpose)
    assert engine._puts_back == (purpose == "training")
