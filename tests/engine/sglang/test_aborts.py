"""Aborts go to whoever works on the request, and what was sampled comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from rollfeed.engine.client import ServerEngine
from rollfeed.generate import default_generate
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.protocols import RolloutRequest, Services
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.types import FinishKind, Prompt, Sample, SampleStatus, SamplingParams, VersionSpan

PROMPT = np.array([3, 4, 5], np.int32)
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
HELD = {"output_ids": [1, 2, 3, 4], "finish_reason": "length", "delay_seconds": 60.0, "num_tokens_when_aborted": 2}


def held(count: int) -> list[dict[str, Any]]:
    return [HELD] * count


async def num_aborts(fakes: Any, worker: int) -> int:
    count: int = (await fakes.stats(worker))["requests"].get("/abort_request", 0)
    return count


async def test_an_abort_by_id_reaches_the_owner_alone_and_leaves_the_others(engine_at: EngineAt) -> None:
    async with (
        serve_fake_sglang(mode="scripted", num_workers=2, script=held(4)) as fakes,
        engine_at(*fakes.addresses) as engine,
    ):
        params = SamplingParams(max_new_tokens=4)
        # "r1" is also the beginning of "r10": a server aborts by prefix.
        tasks = {name: asyncio.create_task(engine.generate(PROMPT, params, request_id=name)) for name in ("r1", "r10")}
        for task in tasks.values():
            assert not task.done()
        while sum([(await fakes.stats(worker))["requests"].get("/generate", 0) for worker in (0, 1)]) < 2:
            pass
        owner = 0 if (await fakes.stats(0))["requests"].get("/generate", 0) else 1
        await engine.abort("r1")
        completion = await tasks["r1"]
        assert completion.token_ids.tolist() == [1, 2]
        assert completion.finish_reason.kind is FinishKind.ABORT
        assert completion.version_spans == (VersionSpan(0, 2, 0),)
        assert await num_aborts(fakes, owner) >= 1  # it is told again until the reply has come
        assert await num_aborts(fakes, 1 - owner) == 0
        assert not tasks["r10"].done()
        await engine.abort()
        assert (await tasks["r10"]).finish_reason.kind is FinishKind.ABORT
        assert min(await num_aborts(fakes, 0), await num_aborts(fakes, 1)) >= 1


@pytest.mark.parametrize("dialect", ["old", "new"])
async def test_behind_a_router_aborts_go_to_the_servers_themselves(engine_at: EngineAt, dialect: str) -> None:
    async with (
        serve_fake_sglang(mode="scripted", num_workers=2, router=dialect, script=held(2)) as fakes,
        engine_at(router=fakes.router_address) as engine,
    ):
        params = SamplingParams(max_new_tokens=4)
        tasks = [asyncio.create_task(engine.generate(PROMPT, params, request_id=f"r{i}")) for i in range(2)]
        while sum([(await fakes.stats(worker))["requests"].get("/generate", 0) for worker in (0, 1)]) < 2:
            pass
        await engine.abort("r0")
        assert (await tasks[0]).token_ids.tolist() == [1, 2]
        assert not tasks[1].done()
        await engine.abort()
        assert (await tasks[1]).finish_reason.kind is FinishKind.ABORT


async def test_unknown_ids_are_fine(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        await engine.abort("nobody")
        assert await num_aborts(fakes, 0) == 0


async def test_what_waits_here_ends_at_once_with_nothing(engine_at: EngineAt) -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=held(1)) as fakes,
        engine_at(fakes.address, concurrency=1) as engine,
    ):
        params = SamplingParams(max_new_tokens=4)
        tasks = [asyncio.create_task(engine.generate(PROMPT, params, request_id=f"r{i}")) for i in range(3)]
        await fakes.wait_until(lambda stats: stats["requests"].get("/generate", 0) == 1)
        await engine.abort()
        completions = await asyncio.gather(*tasks)
        assert [len(each.token_ids) for each in completions] == [2, 0, 0]
        assert {each.finish_reason.kind for each in completions} == {FinishKind.ABORT}
        assert (await fakes.stats())["requests"]["/generate"] == 1


async def test_an_abort_nobody_here_asked_for_goes_on_from_the_tokens_so_far(engine_at: EngineAt) -> None:
    script = [
        {"output_ids": [1, 2], "finish_reason": "abort"},
        {"output_ids": [], "finish_reason": "abort"},
        {"output_ids": [7, 8, 9], "finish_reason": "stop"},
    ]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes, engine_at(fakes.address) as engine:
        params = SamplingParams(max_new_tokens=10, min_new_tokens=4, seed=5)
        completion = await engine.generate(PROMPT, params, request_id="r")
        assert completion.token_ids.tolist() == [1, 2, 7, 8, 9]
        assert completion.finish_reason == (FinishKind.STOP, 9)
        assert completion.version_spans == (VersionSpan(0, 5, 0),)
        assert completion.prompt_tokens == 3
        first, _, last = await fakes.requests()
        assert last["input_ids"] == [3, 4, 5, 1, 2]
        assert last["sampling_params"]["max_new_tokens"] == 8
        assert last["sampling_params"]["min_new_tokens"] == 2
        assert first["sampling_params"]["sampling_seed"] != last["sampling_params"]["sampling_seed"]
        assert engine.metrics()["redispatched_requests"] == 2


@pytest.mark.parametrize("seed", range(3))
async def test_r18_nothing_arrives_after_the_drain_though_one_server_refuses(engine_at: EngineAt, seed: int) -> None:
    random = Random(seed)
    model = {"num_slots": 2, "median_length": 200.0, "max_length": 400}
    async with (
        serve_fake_sglang(mode="time-model", num_workers=3, time_model=model) as fakes,
        engine_at(*fakes.addresses, concurrency=4, probe_interval_seconds=60.0) as engine,
    ):
        gate = EngineGate(engine, max_requests_in_flight=4)
        params = SamplingParams(max_new_tokens=400)

        async def many_turns(number: int) -> None:
            for turn in range(3):
                answer = await gate.generate(PROMPT + number, params, request_id=f"r{number}.{turn}")
                if answer.finish_reason.kind is FinishKind.ABORT:
                    return

        tasks = {asyncio.create_task(many_turns(number)) for number in range(50)}
        await asyncio.sleep(random.uniform(0.0, 0.1))
        fakes.kill(random.randrange(3))
        gate.close()
        async with asyncio.timeout(60):
            pending = tasks
            while pending:
                await gate.abort_all()
                _, pending = await asyncio.wait(pending, timeout=0.1)
        for task in tasks:
            task.result()
        assert gate.num_at_engine == 0
        assert engine.metrics()["requests_in_flight"] == 0
        assert engine.metrics()["concurrency_limit"] == 4


async def test_a_server_that_does_not_confirm_ends_no_abort(scripted: Any, engine_at: EngineAt, until: Until) -> None:
    async with scripted(3) as servers, engine_at(*servers) as engine:
        params = SamplingParams(max_new_tokens=4)
        for server in servers:
            server.generate = server.hold
        tasks = [asyncio.create_task(engine.generate(PROMPT + i, params, request_id=f"r{i}")) for i in range(30)]
        await until(lambda: sum(server.running for server in servers) == 30)
        left = servers[1].running

        async def refuse(_request: Any) -> Any:
            raise ConnectionResetError

        servers[1].answers["/abort_request"] = refuse
        await engine.abort()
        await until(lambda: sum(task.done() for task in tasks) >= 30 - left)
        assert sum(not task.done() for task in tasks) == left
        assert engine.metrics()["failed_aborts"] == 1
        del servers[1].answers["/abort_request"]
        await engine.abort()
        await asyncio.gather(*tasks)


class Turns:
    """Runs ``default_generate`` for one prompt, again and again, on a fake's engine."""

    def __init__(self, engine: ServerEngine, *, max_new_tokens: int) -> None:
        self.engine = engine
        self.request = RolloutRequest(
            prompt=Prompt(prompt_id="p", source="s", text="abc", token_ids=PROMPT),
            params=SamplingParams(max_new_tokens=max_new_tokens),
            group_index=0,
            index=0,
            rollout_id=0,
            step=0,
            max_context_length=1000,
        )

    async def go_on(self, partial: Sample | None) -> Sample:
        request = replace(self.request, partial=partial)
        services = Services(endpoint=self.engine, tokenizer=CharTokenizer(), default=default_generate)
        samples = await default_generate(request, services=services)
        return samples[0]


async def test_r13_every_resumption_asks_for_the_rest_only(engine_at: EngineAt) -> None:
    script = [
        {"output_ids": [40] * count, "delay_seconds": 60.0, "num_tokens_when_aborted": count} for count in (4, 3, 2)
    ]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes, engine_at(fakes.address) as engine:
        turns, partial = Turns(engine, max_new_tokens=10), None
        for number in range(3):
            task = asyncio.create_task(turns.go_on(partial))
            await fakes.wait_until(lambda stats, n=number: stats["requests"].get("/generate", 0) == n + 1)
            await engine.abort()
            partial = await task
            assert partial.status is SampleStatus.ABORTED
        last = await turns.go_on(partial)
        asked = [body["sampling_params"]["max_new_tokens"] for body in await fakes.requests()]
        assert asked == [10, 6, 3, 1]
        assert last.response_length == 10
        assert last.status is SampleStatus.TRUNCATED
        assert turns.request.params.max_new_tokens == 10


async def test_r14_a_spent_budget_is_truncated_without_a_request(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        turns = Turns(engine, max_new_tokens=4)
        full = await turns.go_on(None)
        again = await turns.go_on(replace(full, status=SampleStatus.ABORTED))
        assert (again.status, again.response_length) == (SampleStatus.TRUNCATED, 4)
        nothing = await engine.generate(PROMPT, SamplingParams(max_new_tokens=0), request_id="r")
        assert nothing.finish_reason.kind is FinishKind.LENGTH
        assert (await fakes.stats())["requests"]["/generate"] == 1


async def test_r17_an_early_abort_keeps_the_prompt_and_can_be_resumed(engine_at: EngineAt) -> None:
    script = [{"output_ids": [1], "delay_seconds": 60.0, "num_tokens_when_aborted": 0}]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes, engine_at(fakes.address) as engine:
        turns = Turns(engine, max_new_tokens=4)
        task = asyncio.create_task(turns.go_on(None))
        await fakes.wait_until(lambda stats: stats["requests"].get("/generate", 0) == 1)
        await engine.abort()
        sample = await task
        assert (sample.status, sample.response_length) == (SampleStatus.ABORTED, 0)
        assert sample.token_ids.tolist() == PROMPT.tolist()
        assert (await turns.go_on(sample)).response_length == 4


async def test_r21_a_truncated_answer_stays_truncated(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address) as engine:
        sample = await Turns(engine, max_new_tokens=4).go_on(None)
        assert sample.status is SampleStatus.TRUNCATED


async def test_r11_the_stop_token_is_part_of_the_response(engine_at: EngineAt) -> None:
    script = [{"output_ids": [40, 41, 2], "text": "ab", "finish_reason": "stop"}]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes, engine_at(fakes.address) as engine:
        sample = await Turns(engine, max_new_tokens=9).go_on(None)
        assert sample.status is SampleStatus.COMPLETED
        assert sample.response_length == 3
        assert sample.loss_mask.tolist() == [1.0, 1.0, 1.0]
        assert (await fakes.requests())[0]["sampling_params"]["no_stop_trim"] is True
