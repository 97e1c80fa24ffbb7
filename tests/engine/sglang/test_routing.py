"""Requests of a conversation, and those that begin alike, go where that has been computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from rollfeed.engine.client import ServerEngine
from rollfeed.routing import belonging
from rollfeed.types import SamplingParams, TensorUpdate

PROMPT = np.arange(600, dtype=np.int32) + 1000
PARAMS = SamplingParams(max_new_tokens=4)
EngineAt = Callable[..., ServerEngine]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


async def play(engine: ServerEngine, *, sessions: int, turns: int, tokens: int = 40, beginning: int = 20) -> None:
    """Have conversations take turns, each under its own key and with a beginning of its own."""
    texts = [np.arange(beginning, dtype=np.int32) % 90 + number for number in range(sessions)]
    for turn in range(turns):
        for number, text in enumerate(texts):
            with belonging(session=f"session-{number}"):
                completion = await engine.generate(text, PARAMS, request_id=f"{number}.{turn}")
            told = np.full(tokens, 60 + turn, np.int32)
            texts[number] = np.concatenate([text, completion.token_ids, told])


async def test_conversations_stay_and_what_begins_alike_follows(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(3) as servers, engine_at(*servers) as engine:
        await play(engine, sessions=7, turns=4)
        homes = [{body["rid"].split(".")[0] for body in server.requests} for server in servers]
        assert sum(map(len, homes)) == 7  # none at two servers
        before = engine.metrics()
        assert before["session_choices"] == 7 * 3
        assert before["believed_cached_tokens"] >= 7 * (24 + 68 + 112)
        await engine.generate(PROMPT, PARAMS, request_id="a")
        await engine.generate(np.append(PROMPT, 7), PARAMS, request_id="b")
        after = engine.metrics()
        assert after["prefix_choices"] - before["prefix_choices"] == 1
        assert after["believed_cached_tokens"] - before["believed_cached_tokens"] == 600
        assert after["sent_tokens"] - before["sent_tokens"] == 1201


async def test_nothing_is_believed_of_older_weights_or_of_a_server_that_came_back(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(2) as servers, engine_at(*servers) as engine:
        await engine.generate(PROMPT, PARAMS, request_id="a")
        await engine.apply(TensorUpdate({"w": np.zeros(2, np.float32)}, policy_version=1))
        await engine.generate(PROMPT, PARAMS, request_id="b")
        assert engine.metrics()["believed_cached_tokens"] == 0
        await engine.generate(PROMPT, PARAMS, request_id="c")
        assert engine.metrics()["believed_cached_tokens"] == 599
        (home,) = [server for server in servers if server.requests[-1:] and "c." in server.requests[-1]["rid"]]
        await home.kill()
        await until(lambda: engine.metrics()["live_workers"] == 1)
        await home.start()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        await engine.generate(PROMPT, PARAMS, request_id="d")
        assert engine.metrics()["believed_cached_tokens"] == 599


async def test_what_a_server_says_that_it_had_is_counted(scripted: Any, engine_at: EngineAt, reply: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(reply([5] * 4, to=await request.json(), cached_tokens=123))

    async with scripted() as (server,), engine_at(server) as engine:
        server.generate = answer
        await engine.generate(PROMPT, PARAMS, request_id="a")
        assert (engine.metrics()["told_cached_tokens"], engine.metrics()["sent_tokens"]) == (123, 600)


async def test_in_turn_every_server_gets_its_part(scripted: Any, engine_at: EngineAt) -> None:
    async with scripted(3) as servers, engine_at(*servers, routing="round_robin") as engine:
        for number in range(6):
            await engine.generate(PROMPT, PARAMS, request_id=f"r{number}")
        assert [len(server.requests) for server in servers] == [2, 2, 2]
        assert engine.metrics()["load_choices"] == 6


async def test_the_least_loaded_server_gets_a_request_whatever_it_has_computed(
    scripted: Any, engine_at: EngineAt, until: Until
) -> None:
    async with scripted(3) as servers, engine_at(*servers, routing="least_loaded") as engine:
        for server in servers:
            server.generate = server.hold
        tasks = [asyncio.create_task(engine.generate(PROMPT, PARAMS, request_id=f"r{n}")) for n in range(9)]
        await until(lambda: all(len(server.pending) == 3 for server in servers))
        await engine.abort()
        await asyncio.gather(*tasks)


async def test_behind_a_router_requests_carry_the_key_that_it_reads(scripted: Any, engine_at: EngineAt) -> None:
    seen: list[tuple[str | None, str | None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers.get("X-SMG-Routing-Key"), request.headers.get("X-Session-ID")))
        return await worker.answer_whole(request)

    async def workers(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"workers": [{"id": "1", "url": worker.address, "is_healthy": True}]})

    async with scripted(2) as (worker, router):
        router.answers["/workers"], router.generate = workers, answer
        async with engine_at(router=router.address) as engine:
            for group, session in ((None, None), ("g", None), ("g", "s\r\nX: y"), ("h", "s\r\nX: y"), ("g", "s")):
                with belonging(group=group, session=session):
                    await engine.generate(PROMPT, PARAMS, request_id="r")
    assert [first for first, _ in seen] == [second for _, second in seen]
    none, of_group, *of_sessions = [first for first, _ in seen]
    assert none is None
    assert len({of_group, *of_sessions}) == 3
    assert of_sessions[0] == of_sessions[1]


async def test_servers_of_ours_compute_less_than_in_turn(embedded_server: Any, engine_at: EngineAt) -> None:
    cached, believed = {}, {}
    for routing in ("prefix", "round_robin"):
        async with (
            embedded_server() as one,
            embedded_server() as other,
            engine_at(one, other, routing=routing, context_length=250) as engine,
        ):
            await play(engine, sessions=1, turns=4, tokens=20)
            metrics = engine.metrics()
            cached[routing], believed[routing] = metrics["told_cached_tokens"], metrics["believed_cached_tokens"]
    assert cached["prefix"] > cached["round_robin"]
    assert cached["prefix"] > 0.9 * believed["prefix"] > 0
