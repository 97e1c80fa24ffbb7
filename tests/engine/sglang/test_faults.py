"""Each thing that goes wrong at a server, over real sockets: an answer or an error in time, and the right count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import Completion, FinishKind, SamplingParams, TensorUpdate

PROMPT = np.array([3, 4, 5], np.int32)
EngineAt = Callable[..., ServerEngine]


def ask(engine: ServerEngine, count: int = 1, *, tokens: int = 4) -> Sequence[Any]:
    params = SamplingParams(max_new_tokens=tokens)
    return [engine.generate(PROMPT, params, request_id=f"r{number}") for number in range(count)]


def check_whole(completions: Sequence[Completion], *, tokens: int = 4) -> None:
    for completion in completions:
        assert len(completion.token_ids) == tokens
        assert completion.finish_reason.kind is FinishKind.LENGTH
        assert completion.prompt_tokens == 3


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        ({"fault": "reset", "fraction": 0.0}, "connection_failures"),
        ({"fault": "reset", "fraction": 0.5}, "connection_failures"),
        ({"fault": "truncated_json"}, "broken_replies"),
        ({"fault": "status", "status": 500}, "server_errors"),
        ({"fault": "status", "status": 503}, "server_errors"),
        ({"fault": "status", "status": 429}, "refused_requests"),
    ],
)
async def test_what_can_succeed_is_tried_again(engine_at: EngineAt, fault: dict[str, Any], counter: str) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        await fakes.add_fault(**fault, times=2)
        check_whole(await asyncio.gather(*ask(engine, 5)))
        metrics = engine.metrics()
        assert metrics[counter] == 2
        assert metrics["retries"] == 2
        assert metrics["requests_in_flight"] == 0
        stats = await fakes.stats()
    assert stats["requests"]["/generate"] == 7


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"fault": "status", "status": 400, "message": "too long"}, "HTTP 400: too long"),
        ({"fault": "status", "status": 404}, "HTTP 404"),
        ({"fault": "wrong_logprob_count"}, "logprobs"),
        ({"fault": "missing_finish_reason"}, "finish_reason"),
    ],
)
async def test_what_can_never_succeed_is_not_tried_again(
    engine_at: EngineAt, fault: dict[str, Any], message: str
) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        await fakes.add_fault(**fault)
        with pytest.raises(EngineProtocolError, match=message):
            await ask(engine)[0]
        metrics = engine.metrics()
        assert metrics["rejected_replies"] == 1
        assert metrics["retries"] == 0
        assert metrics["orphans"] == 0
        assert (await fakes.stats())["requests"]["/generate"] == 1


@pytest.mark.parametrize("tries", [1, 3])
async def test_r32_exactly_as_many_tries_as_allowed(engine_at: EngineAt, tries: int) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address, max_tries=tries) as engine:
        await fakes.add_fault("status", status=500)
        with pytest.raises(EngineUnavailableError, match=f"after {tries} failed tries; the last: .* HTTP 500"):
            await ask(engine)[0]
        assert (await fakes.stats())["requests"]["/generate"] == tries


@in_virtual_time
async def test_a_server_that_hangs_costs_the_deadline_and_is_counted(engine_at: EngineAt) -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        engine_at(fakes.address, request_timeout_seconds=0.3) as engine,
    ):
        await fakes.add_fault("hang", times=1)
        with pytest.raises(EngineUnavailableError, match=r"request_timeout_seconds = 0\.3"):
            await ask(engine)[0]
        await fakes.wait_until(lambda stats: stats["requests"].get("/abort_request", 0) == 1)
        check_whole(await asyncio.gather(*ask(engine)))
        metrics = engine.metrics()
        assert metrics["timed_out_requests"] == 1
        assert metrics["orphaned_requests"] == 1
        assert metrics["orphaned_tokens"] == 4


@in_virtual_time
async def test_the_deadline_begins_with_a_requests_turn(engine_at: EngineAt) -> None:
    script = [{"output_ids": [1, 2, 3, 4], "finish_reason": "length", "delay_seconds": 0.6}] * 6
    async with (
        serve_fake_sglang(mode="scripted", script=script) as fakes,
        engine_at(fakes.address, concurrency=1, request_timeout_seconds=3.0) as engine,
    ):
        check_whole(await asyncio.gather(*ask(engine, 6)))
        assert engine.metrics()["timed_out_requests"] == 0


@in_virtual_time
async def test_refused_connections_are_survived(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        await fakes.add_fault("refuse", seconds=0.3)
        check_whole(await asyncio.gather(*ask(engine, 20)))
        assert engine.metrics()["connection_failures"] + engine.metrics()["dead_workers"] > 0
        assert engine.metrics()["requests_in_flight"] == 0


@in_virtual_time
async def test_nobody_there_at_all_ends_with_the_deadline(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes:
        engine = engine_at(fakes.address, request_timeout_seconds=0.5)
        async with engine:
            await fakes.add_fault("refuse")
            with pytest.raises(EngineUnavailableError):
                await ask(engine)[0]


async def test_a_stale_answer_is_thrown_away_and_its_server_taken_out(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, engine_at(*fakes.addresses) as engine:
        await engine.apply(TensorUpdate({"w": np.zeros(2, np.float32)}, policy_version=3))
        await fakes.add_fault("stale_version", times=1, worker=0)
        completions = await asyncio.gather(*ask(engine, 40))
        check_whole(completions)
        assert {span.policy_version for each in completions for span in each.version_spans} == {3}
        metrics = engine.metrics()
        assert metrics["stale_replies"] == 1
        assert metrics["dead_workers"] == 1


async def test_cancelling_aborts_at_the_server(engine_at: EngineAt) -> None:
    script = [{"output_ids": [1, 2, 3, 4], "finish_reason": "length", "delay_seconds": 60.0}]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes, engine_at(fakes.address) as engine:
        task = asyncio.create_task(ask(engine)[0])
        await fakes.wait_until(lambda stats: stats["requests"].get("/generate", 0) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fakes.wait_until(lambda stats: stats["requests"].get("/abort_request", 0) == 1)
        assert engine.metrics()["orphaned_requests"] == 1
        assert engine.metrics()["requests_in_flight"] == 0


async def test_r34_counts_are_zero_after_failures_and_cancellations(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        await fakes.add_fault("status", status=400, times=3)
        outcomes = await asyncio.gather(*ask(engine, 3), return_exceptions=True)
        assert all(isinstance(outcome, EngineProtocolError) for outcome in outcomes)
        await fakes.add_fault("hang", times=1)
        hanging = asyncio.create_task(ask(engine)[0])
        await fakes.wait_until(lambda stats: stats["requests"]["/generate"] == 4)
        assert engine.metrics()["requests_in_flight"] == 1
        hanging.cancel()
        await asyncio.wait([hanging])
        assert engine.metrics()["requests_in_flight"] == 0
        load = await engine.load()
        assert load.waiting == 0


@in_virtual_time
async def test_leaving_fails_what_is_pending_and_leaves_nothing_at_the_server(engine_at: EngineAt) -> None:
    script = [{"output_ids": [1], "delay_seconds": 60.0}] * 3
    async with serve_fake_sglang(mode="scripted", script=script) as fakes:
        async with engine_at(fakes.address) as engine:
            tasks = [asyncio.create_task(each) for each in ask(engine, 3)]
            await fakes.wait_until(lambda stats: stats["requests"].get("/generate", 0) == 3)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineUnavailableError) for outcome in outcomes)
        assert (await fakes.stats())["requests"]["/abort_request"] == 3
        with pytest.raises(EngineUnavailableError, match="not started"):
            await ask(engine)[0]
