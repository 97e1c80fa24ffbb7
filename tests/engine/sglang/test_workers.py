"""Servers that die, come back, or are slow to say that they live."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.engine.client import ServerEngine
from rollfeed.engine.client.replies import ServerLoad
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.routing import belonging
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import EngineLoad, FinishKind, SamplingParams, TensorUpdate

PROMPT = np.array([3, 4, 5], np.int32)
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
PARAMS = SamplingParams(max_new_tokens=4)


async def test_r31_all_samples_finish_when_one_of_three_servers_dies(engine_at: EngineAt, until: Until) -> None:
    model = {"num_slots": 8, "median_length": 40.0, "max_length": 60}
    async with (
        serve_fake_sglang(mode="time-model", num_workers=3, time_model=model, speed=10.0) as fakes,
        engine_at(*fakes.addresses, concurrency=24) as engine,
    ):
        params = SamplingParams(max_new_tokens=60)
        tasks = [
            asyncio.create_task(engine.generate(PROMPT + number, params, request_id=f"r{number}"))
            for number in range(120)
        ]
        backend = fakes.servers[1].backend
        await until(lambda: sum(task.done() for task in tasks) >= 10 and backend.usage().num_running > 0)
        fakes.kill(1)
        completions = await asyncio.gather(*tasks)
        assert len(completions) == 120
        assert all(each.finish_reason.kind is not FinishKind.ABORT for each in completions)
        assert all(len(each.token_ids) == len(each.logprobs) > 0 for each in completions)
        await until(lambda: engine.metrics()["live_workers"] == 2)
        metrics = engine.metrics()
        assert metrics["dead_workers"] == 1
        assert metrics["redispatched_requests"] > 0
        assert metrics["requests_in_flight"] == 0
        per_server = [await fakes.stats(worker) for worker in (0, 2)]
        answered = sum(stats["requests"]["/generate"] for stats in per_server)
        await engine.generate(PROMPT, PARAMS, request_id="after")
        after = [await fakes.stats(worker) for worker in (0, 2)]
        assert sum(stats["requests"]["/generate"] for stats in after) == answered + 1


@in_virtual_time
async def test_a_server_that_hangs_is_taken_out_and_its_requests_go_elsewhere(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_timeout_seconds=0.5) as engine:
        first, second = servers
        first.generate = second.generate = first.hold
        tasks = [asyncio.create_task(engine.generate(PROMPT, PARAMS, request_id=f"r{i}")) for i in range(30)]
        await until(lambda: first.running + second.running == 30)
        sick, well = (first, second) if first.running else (second, first)
        well.generate = well.answer_whole
        sick.health_delay, sick.abort_gate = asyncio.Event(), asyncio.Event()
        moved = sick.running
        await until(lambda: engine.metrics()["live_workers"] == 1)
        await until(lambda: len(well.requests) >= moved)
        well.abort(None)  # what it held from before
        first.abort(None)
        completions = await asyncio.gather(*tasks)
        assert [len(each.token_ids) for each in completions] == [4] * 30
        assert engine.metrics()["orphaned_requests"] == moved
        assert sick.bodies("/abort_request") == []  # it is out, and would keep others' aborts waiting
        await engine.abort()  # confirmed by the other one only
        assert engine.metrics()["orphans"] == moved
        assert engine.metrics()["orphans_max_tokens"] == 4 * moved
        sick.health_delay.set()
        sick.abort_gate.set()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        assert engine.metrics()["orphans"] == 0


async def test_one_or_two_failed_probes_do_not_take_a_server_out(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted() as (server,), engine_at(server, probes_until_dead=3) as engine:
        failures = 0

        async def fail_twice(_request: Any) -> Any:
            nonlocal failures
            failures += 1
            if failures <= 2:
                raise ConnectionResetError
            del server.answers["/health"]
            return await server._control("/health", {})

        server.answers["/health"] = fail_twice
        await until(lambda: "/health" not in server.answers)
        seen = len(server.bodies("/health"))
        await until(lambda: len(server.bodies("/health")) > seen)
        assert engine.metrics()["dead_workers"] == 0


async def test_a_server_returns_with_the_current_weights_before_it_is_asked_anything(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        await engine.apply(TensorUpdate({"w": np.zeros(2, np.float32)}, policy_version=5))
        lost = servers[0]
        await lost.kill()
        await until(lambda: engine.metrics()["live_workers"] == 1)
        lost.version, lost.calls = "default", []  # restarted from its own checkpoint
        await lost.start()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        assert lost.version == "5"
        completions = await asyncio.gather(
            *(engine.generate(PROMPT + i, PARAMS, request_id=f"r{i}") for i in range(40))
        )
        assert lost.requests
        order = [path for path, _ in lost.calls if path in ("/generate", "/update_weights_from_disk")]
        assert order[0] == "/update_weights_from_disk"
        assert {span.policy_version for each in completions for span in each.version_spans} == {5}
        assert engine.metrics()["readmitted_workers"] == 1


async def test_a_server_that_restarted_between_two_probes_is_found_by_its_version(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        await engine.apply(TensorUpdate({"w": np.zeros(2, np.float32)}, policy_version=5))
        server.version = "default"
        await until(lambda: engine.metrics()["readmitted_workers"] == 1)
        assert server.version == "5"


async def test_r33_a_slow_health_probe_holds_nothing_up(engine_at: EngineAt) -> None:
    async with serve_fake_sglang(mode="zero") as fakes, engine_at(fakes.address, probe_timeout_seconds=60.0) as engine:
        await fakes.add_fault("slow_health", seconds=30.0)
        probes = (await fakes.wait_until(lambda stats: "slow_health" in stats["faults"]))["requests"]["/health"]
        await asyncio.gather(*(engine.generate(PROMPT, PARAMS, request_id=f"r{i}") for i in range(100)))
        stats = await fakes.stats()
        assert stats["requests"]["/generate"] == 100
        assert stats["requests"]["/health"] == probes
        await fakes.clear_faults()


async def test_health_is_refused_when_no_server_is_left(scripted: Any, engine_at: EngineAt, until: Until) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        await engine.health()
        await server.kill()
        await until(lambda: engine.metrics()["live_workers"] == 0)
        with pytest.raises(EngineUnavailableError, match="none of 1 servers"):
            await engine.health()


async def test_samples_of_one_prompt_meet_at_one_server_and_others_spread(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        with belonging(group="of one prompt"):
            await asyncio.gather(*(engine.generate(PROMPT, PARAMS, request_id=f"r{i}") for i in range(8)))
        assert sorted(len(server.requests) for server in servers) == [0, 8]
        prompts = [np.array([number, 7], np.int32) for number in range(200)]
        await asyncio.gather(*(engine.generate(ids, PARAMS, request_id="x") for ids in prompts))
        assert min(len(server.requests) for server in servers) > 50


@pytest.mark.parametrize("path", ["/workers", "/list_workers"])
async def test_a_router_under_workers_is_refused(scripted: Any, engine_at: EngineAt, path: str) -> None:
    async with scripted() as (server,):
        answer = {"/workers": {"workers": []}, "/list_workers": {"urls": []}}[path]

        async def listed(_request: Any) -> Any:
            from aiohttp import web

            return web.json_response(answer)

        server.answers[path] = listed
        with pytest.raises(EngineProtocolError, match=r"is a router: give it as engine\.sglang\.router"):
            await engine_at(server).__aenter__()


async def test_what_is_no_sglang_server_is_refused(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted() as (server,):
        server.answers["/get_model_info"] = server.answers["/model_info"] = _not_found
        with pytest.raises(EngineProtocolError, match="not an SGLang server"):
            await engine_at(server).__aenter__()


async def _not_found(_request: Any) -> Any:
    from aiohttp import web

    return web.Response(status=404)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"loads": []},
        {"loads": [3]},
        {"loads": [{"num_running_reqs": None}]},
        {"loads": [{"gen_throughput": "x"}]},
        {"loads": [{"queues": 3}]},
        {"loads": [{"num_running_reqs": 1e999}]},
        {"loads": [{"num_used_tokens": 5, "total_prefill_uncached_tokens": 7}]},
    ],
)
async def test_a_load_that_makes_no_sense_is_as_good_as_none(scripted: Any, engine_at: EngineAt, content: Any) -> None:
    async with scripted() as (server,), engine_at(server) as engine:

        async def answer(_request: Any) -> Any:
            return web.json_response(content)

        server.answers["/v1/loads"] = answer
        assert await engine.load() == EngineLoad(running=0, waiting=0)


async def test_the_fullest_rank_of_a_server_counts(scripted: Any, engine_at: EngineAt) -> None:
    ranks = [
        {
            "num_running_reqs": 3,
            "num_waiting_reqs": 1,
            "num_used_tokens": 1_000,
            "token_usage": 0.5,
            "total_prefill_uncached_tokens": 50_000,
            "total_prefill_busy_us": 1_000_000,
            "queues": {"retracted": 2},
        },
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.75, "gen_throughput": 5.0},
    ]
    async with scripted() as (server,), engine_at(server) as engine:

        async def answer(request: web.Request) -> Any:
            assert request.query["include"] == "core,queues"
            return web.json_response({"loads": ranks})

        server.answers["/v1/loads"] = answer
        dialect: Any = engine._dialect
        expected = ServerLoad(running=7, waiting=1, tokens_per_second=None, kv_use=0.75, num_preempted=2)
        assert await dialect.load(server.address) == expected._replace(recompute_seconds=0.02)
        ranks[0]["gen_throughput"] = 0.0
        assert (await dialect.load(server.address)).tokens_per_second == 5.0
        ranks[1]["gen_throughput"] = 0.0  # started without --enable-metrics
        assert (await dialect.load(server.address)).tokens_per_second is None
        del ranks[0]["gen_throughput"]
        del ranks[0]["total_prefill_busy_us"]  # an older server
        del ranks[0]["total_prefill_uncached_tokens"]
        assert await dialect.load(server.address) == expected

        async def count(_request: web.Request) -> Any:
            line = 'sglang:num_retracted_requests_total{model_name="/a{b}",tp_rank="0"} '
            return web.Response(text=f"{line}3.0\n{line}1e+02\n{line}many\nsglang:num_retracted_reqs 5.0\n")

        server.answers["/metrics"] = count
        assert await dialect.load(server.address) == expected._replace(total_preempted=103)
        ranks[0]["num_waiting_reqs"] = 0  # nobody need leave it
        assert (await dialect.load(server.address)).total_preempted is None


async def test_a_server_that_says_it_is_full_gets_no_request_while_another_has_room(
    scripted: Any, engine_at: EngineAt, until: Any
) -> None:
    async with scripted(2) as (full, other), engine_at(full, other) as engine:

        async def answer(_request: web.Request) -> Any:
            return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 9, "token_usage": 1.0}]})

        full.answers["/v1/loads"] = answer
        worker = engine._pool.workers[0]
        await until(lambda: worker.load is not None)
        full.generate = other.generate = other.hold
        prompts = [np.arange(4, dtype=np.int32) + 7 * index for index in range(12)]
        params = SamplingParams(max_new_tokens=4)
        tasks = [
            asyncio.create_task(engine.generate(each, params, request_id=f"r{i}")) for i, each in enumerate(prompts)
        ]
        await until(lambda: full.running + other.running == 12)
        assert full.running == 1  # what makes progress is left to it
        await engine.abort()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("version", [None, [], "latest"])
async def test_a_version_without_a_number_is_refused(scripted: Any, engine_at: EngineAt, version: Any) -> None:
    async with scripted() as (server,):
        server.version = version
        with pytest.raises(EngineProtocolError, match="is no policy version: name the weights"):
            await engine_at(server).__aenter__()


async def test_a_probe_that_ends_while_servers_rest_brings_none_back(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted() as (server,), engine_at(server, probe_timeout_seconds=60.0) as engine:
        server.health_delay = asyncio.Event()
        num_probes = len(server.bodies("/health"))
        await until(lambda: len(server.bodies("/health")) > num_probes)
        engine.weights.rest()
        await engine._pool.take_out(engine._pool.workers[0], "it does not give up its memory")
        num_calls = len(server.calls)
        server.health_delay.set()
        await until(lambda: len(server.calls) > num_calls)
        await asyncio.sleep(0.3)  # it would be back at once
        assert engine.metrics()["live_workers"] == 0
        engine.weights.look_after()
        await until(lambda: engine.metrics()["live_workers"] == 1)


@in_virtual_time
async def test_nobody_at_the_address_is_told_with_the_time_waited(engine_at: EngineAt) -> None:
    engine = engine_at("http://127.0.0.1:9", startup_timeout_seconds=0.3)
    with pytest.raises(EngineUnavailableError, match=r"startup_timeout_seconds = 0\.3: http://127\.0\.0\.1:9"):
        await engine.__aenter__()


async def test_a_server_that_says_nothing_is_named_with_the_time_waited(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted() as (server,):
        server.health_delay = asyncio.Event()
        engine = engine_at(server, startup_timeout_seconds=0.3, probe_timeout_seconds=60.0)
        with pytest.raises(EngineUnavailableError, match=rf"startup_timeout_seconds = 0\.3: {server.address}: no answ"):
            await engine.__aenter__()


async def test_the_version_that_all_serve_is_where_the_engine_begins(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers:
        for server in servers:
            server.version = "v7"
        async with engine_at(*servers) as engine:
            assert engine.policy_version == 7
            assert engine.precision == "bf16"


async def test_a_context_that_the_server_has_not_is_refused(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted() as (server,):
        with pytest.raises(EngineProtocolError, match=r"engine\.context_length = 200000: .* takes 100000"):
            await engine_at(server, context_length=200_000).__aenter__()


async def test_an_older_server_answers_under_older_names(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted() as (server,):
        server.answers["/model_info"] = _not_found
        async with engine_at(server) as engine:
            assert engine.precision == "bf16"
        assert {"/get_model_info", "/get_server_info"} <= {path for path, _ in server.calls}
