"""Which version sampled which token, and servers that say nothing while they are paused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.engine.client import ServerEngine
from rollfeed.engine.client.versions import version_number
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import FinishKind, SamplingParams, TensorUpdate, VersionSpan

CAPTURED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "server" / "data" / "sglang_wire_0523.json").read_text()
)
PROMPT = np.array([3, 4, 5], np.int32)
TENSORS = {"w": np.arange(4, dtype=np.float32)}
HELD = {"output_ids": [1, 2, 3, 4, 5, 6], "finish_reason": "length", "num_tokens_when_aborted": 2}
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def spans_of(told: list[dict[str, Any]], *, later: int = 0) -> tuple[tuple[int, int, int], ...]:
    """The spans of a reply as tuples, inner borders ``later`` tokens on."""
    last = len(told) - 1
    return tuple(
        (each["start"] + later * (index > 0), each["end"] + later * (index < last), version_number(each["version"]))
        for index, each in enumerate(told)
    )


async def answered(
    scripted: Any, engine_at: EngineAt, reply: Any, told: list[dict[str, Any]], *, info: Any = None, **settings: Any
) -> tuple[VersionSpan, ...]:
    """What the engine makes of a reply with these versions."""
    num_tokens = told[-1]["end"]
    async with scripted() as (server,):
        server.version = told[0]["version"]

        async def answer(request: web.Request) -> web.StreamResponse:
            body, server.version = await request.json(), told[-1]["version"]
            return web.json_response(
                reply([7] * num_tokens, to=body, version=told[-1]["version"], weight_versions=told)
            )

        async def describe(_request: web.Request) -> web.StreamResponse:
            return web.json_response(info or {})

        server.generate = answer
        server.answers["/server_info"] = describe
        async with engine_at(server, **settings) as engine:
            completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=num_tokens), request_id="r")
        return completion.version_spans


@pytest.mark.parametrize("captured", CAPTURED["through_several_updates"], ids=["five versions", "four versions"])
async def test_a_request_through_several_updates_keeps_a_span_for_each(
    scripted: Any, engine_at: EngineAt, reply: Any, captured: Any
) -> None:
    told = captured["weight_versions"]
    assert await answered(scripted, engine_at, reply, told) == spans_of(told)
    assert await answered(scripted, engine_at, reply, told, weight_update="retract") == spans_of(told)


@pytest.mark.parametrize(
    ("info", "later"),
    [({}, 1), ({"disable_overlap_schedule": False}, 1), ({"disable_overlap_schedule": True}, 0)],
    ids=["unknown", "overlapping", "not overlapping"],
)
async def test_in_place_the_first_token_of_a_span_is_the_older_versions_where_steps_overlap(
    scripted: Any, engine_at: EngineAt, reply: Any, info: Any, later: int
) -> None:
    told = CAPTURED["through_several_updates"][0]["weight_versions"]
    got = await answered(scripted, engine_at, reply, told, info=info, weight_update="in_place")
    assert got == spans_of(told, later=later)


async def test_in_place_a_span_of_one_last_token_is_none(scripted: Any, engine_at: EngineAt, reply: Any) -> None:
    told = [{"version": "1", "start": 0, "end": 8}, {"version": "2", "start": 8, "end": 9}]
    assert await answered(scripted, engine_at, reply, told, weight_update="in_place") == ((0, 9, 1),)
    told = [{"version": str(number), "start": number, "end": number + 1} for number in range(3)]
    assert await answered(scripted, engine_at, reply, told, weight_update="in_place") == ((0, 2, 0), (2, 3, 1))


@pytest.mark.parametrize(("mode", "border"), [("in_place", 3), ("retract", 2)])
@in_virtual_time
async def test_what_runs_through_an_update_has_both_versions(engine_at: EngineAt, mode: str, border: int) -> None:
    script = [{**HELD, "delay_seconds": 60.0}]
    async with (
        serve_fake_sglang(mode="scripted", script=script, speed=200.0) as fakes,
        engine_at(fakes.address, weight_update=mode) as engine,
    ):
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_new_tokens=6), request_id="r"))
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        await engine.apply(TensorUpdate(TENSORS, policy_version=4))
        completion = await task
    assert completion.version_spans == (VersionSpan(0, border, 0), VersionSpan(border, 6, 4))
    assert completion.finish_reason.kind is FinishKind.LENGTH


@pytest.mark.parametrize(("mode", "release"), [("abort", "0.5.23"), ("abort", "0.5.15"), ("retract", "0.5.15")])
async def test_an_update_that_ends_what_runs_needs_no_pause(engine_at: EngineAt, mode: str, release: str) -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[{**HELD, "delay_seconds": 60.0}], release=release) as fakes,
        engine_at(fakes.address, weight_update=mode) as engine,
    ):
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_new_tokens=6), request_id="r"))
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        await engine.apply(TensorUpdate(TENSORS, policy_version=4))
        requests = (await fakes.stats())["requests"]
        assert (await task).version_spans == (VersionSpan(0, 2, 0), VersionSpan(2, 6, 4))
    assert "/pause_generation" not in requests


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@in_virtual_time
async def test_weights_change_during_a_pause_of_the_caller(engine_at: EngineAt, mode: str) -> None:
    script = [{**HELD, "delay_seconds": 60.0}]
    async with (
        serve_fake_sglang(mode="scripted", script=script, speed=100.0) as fakes,
        engine_at(fakes.address, weight_update=mode) as engine,
    ):
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_new_tokens=6), request_id="r"))
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        await engine.pause()
        await engine.apply(TensorUpdate(TENSORS, policy_version=4))
        assert (await fakes.stats())["weight_version"] == "4"
        await engine.resume()
        assert {span.policy_version for span in (await task).version_spans} == {0, 4}


async def test_a_server_that_cannot_flush_says_so_once_it_has_the_weights(
    scripted: Any, engine_at: EngineAt, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=400)

    async with scripted() as (server,), engine_at(server, weight_update="retract") as engine:
        server.answers["/flush_cache"] = refuse
        await engine.apply(TensorUpdate(TENSORS, policy_version=4))
        assert [body["flush_cache"] for body in server.bodies("/update_weights_from_disk")] == [False]
        assert engine.policy_version == 4
    assert "goes on with keys and values of older weights" in caplog.text


async def test_an_idle_server_forgets_what_older_weights_have_cached_in_place_too(engine_at: EngineAt) -> None:
    settings = {"mode": "time-model", "speed": 1e5, "time_model": {"prefix_cache": True, "median_length": 3.0}}
    async with serve_fake_sglang(**settings) as fakes, engine_at(fakes.address, weight_update="in_place") as engine:
        params = SamplingParams(max_new_tokens=4)
        cached = [(await engine.generate(PROMPT, params, request_id=f"r{i}")).cached_tokens for i in range(2)]
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        cached.append((await engine.generate(PROMPT, params, request_id="after")).cached_tokens)
    assert cached == [0, 2, 0]


NO_VERSIONS = ["1795878903.01", "3f2a9c1", "deadbeef12", "2026-11-28", "run2-step-7", "main", "", "-7", "1.0"]


@pytest.mark.parametrize("name", [*NO_VERSIONS, -1])
async def test_a_name_that_is_no_policy_version_is_refused_with_what_to_do(
    scripted: Any, engine_at: EngineAt, name: Any
) -> None:
    async with scripted() as (server,):
        server.version = name
        with pytest.raises(EngineProtocolError) as caught:
            await engine_at(server).__aenter__()
    assert server.address in str(caught.value)
    assert repr(name) in str(caught.value)
    assert "/update_weight_version" in str(caught.value)


async def test_such_a_name_in_a_reply_names_the_server_too(scripted: Any, engine_at: EngineAt, reply: Any) -> None:
    told = [{"version": "default", "start": 0, "end": 1}, {"version": "1795878903.01", "start": 1, "end": 2}]
    with pytest.raises(EngineProtocolError, match=r"http://127\.0\.0\.1:\d+: .*'1795878903\.01'"):
        await answered(scripted, engine_at, reply, told)


@in_virtual_time
async def test_a_pause_takes_no_server_out(engine_at: EngineAt) -> None:
    async with (
        serve_fake_sglang() as fakes,
        engine_at(fakes.address, probe_interval_seconds=0.02, probe_timeout_seconds=0.5) as engine,
    ):
        await fakes.wait_until(lambda stats: stats["requests"]["/health"] > 2)
        await engine.pause()
        await asyncio.sleep(3.0)  # as long as twice the probes that would take it out
        assert engine.metrics()["dead_workers"] == 0
        await engine.resume()
        completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
        assert len(completion.token_ids) == 2
        assert engine.metrics()["dead_workers"] == 0


async def test_a_server_that_died_during_a_pause_is_out_when_it_ends(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        await engine.pause()
        await servers[0].kill()
        await engine.resume()
        assert engine.metrics()["live_workers"] == 1
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
        await engine.pause()
        await servers[1].kill()
        with pytest.raises(EngineUnavailableError, match="no worker goes on after a pause"):
            await engine.resume()


async def test_a_server_taken_out_while_it_was_paused_comes_back(engine_at: EngineAt, until: Until) -> None:
    async with serve_fake_sglang(num_workers=2) as fakes, engine_at(*fakes.addresses) as engine:
        await engine.pause()
        await fakes.add_fault("status", status=500, path="/update_weights_from_disk", times=1, worker=0)
        await engine.apply(TensorUpdate(TENSORS, policy_version=1))
        assert engine.metrics()["live_workers"] == 1
        await engine.resume()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        assert {(await fakes.stats(worker))["weight_version"] for worker in (0, 1)} == {"1"}


async def test_an_abort_during_a_pause_returns_and_the_request_ends_with_it(engine_at: EngineAt) -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[{**HELD, "delay_seconds": 60.0}]) as fakes,
        engine_at(fakes.address) as engine,
    ):
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_new_tokens=6), request_id="r"))
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        await engine.pause()
        async with asyncio.timeout(20):
            await engine.abort("r")
        assert not task.done()
        await engine.resume()
        completion = await task
    assert (completion.finish_reason.kind, len(completion.token_ids)) == (FinishKind.ABORT, 2)
