"""Requests through a router reach workers, whatever some of these do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.router.routing_fakes import DEADLINE_SECONDS, Routed, routed

from rollfeed.base.serving import serve_application
from rollfeed.router.span_cache import SpanCache
from rollfeed.testing import CharTokenizer
from rollfeed.testing.fake_sglang import Fakes, ScriptedReply, serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time

LONG = ScriptedReply(output_ids=[3, 1, 2], delay_seconds=1000.0, num_tokens_when_aborted=2)


def ids_of(reply: Any) -> list[int]:
    ids: list[int] = reply.json["output_ids"]
    return ids


async def counted(fakes: Fakes, path: str) -> list[int]:
    return [(await fakes.stats(number))["requests"].get(path, 0) for number in range(len(fakes.addresses))]


def at(router: Routed, address: str) -> int:
    return router.fleet.members[address].num_requests


async def owner_of_the_only_request(fakes: Fakes, router: Routed) -> int:
    await router.until(lambda: sum(at(router, address) for address in fakes.addresses) == 1)
    owner = next(number for number, address in enumerate(fakes.addresses) if at(router, address))
    await fakes.wait_until(lambda stats: stats["num_running"] == 1, worker=owner)
    return owner


@asynccontextmanager
async def _flood() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Serve a stream that has no end; the event is set when it has begun."""
    began = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        began.set()
        while True:
            await response.write(b"data: " + b"1" * (1 << 16) + b"\n\n")

    application = web.Application()
    application.add_routes([web.post("/generate", generate)])
    async with serve_application(application, host="127.0.0.1", port=0) as address:
        yield address, began


async def test_a_request_is_passed_on_as_it_is_and_its_reply_comes_back_with_the_name_of_its_worker() -> None:
    script = [ScriptedReply(output_ids=[9, 8], logprobs=[-0.5, -0.25], text="so")]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes, routed(fakes.addresses) as router:
        reply = await router.generate(rid="r")
        assert reply.status == 200
        assert ids_of(reply) == [9, 8]
        assert [entry[0] for entry in reply.json["meta_info"]["output_token_logprobs"]] == [-0.5, -0.25]
        assert reply.headers["X-Worker"] == fakes.addresses[0]
        sent = (await fakes.requests())[0]
    assert sent == {
        "rid": "r",
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4},
        "return_logprob": True,
    }


async def test_a_stream_passes_to_its_end_and_frees_the_worker() -> None:
    async with serve_fake_sglang(mode="scripted", script=[LONG]) as fakes, routed(fakes.addresses) as router:
        asked = asyncio.create_task(router.generate(rid="s", stream=True))
        await owner_of_the_only_request(fakes, router)
        await router.post("/abort_request", rid="s")
        reply = await asked
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        *_, last, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        assert at(router, fakes.addresses[0]) == 0


async def test_what_a_worker_calls_wrong_fails_at_once() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        refused = await router.generate(num_tokens=-1)
        assert refused.status == 400
        assert "max_new_tokens" in refused.text
        assert sum(await counted(fakes, "/generate")) == 1
        async with aiohttp.ClientSession() as session, session.post(f"{router.address}/generate", data=b"{") as reply:
            assert reply.status == 400
            assert "not JSON" in await reply.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["status", "reset"])
@pytest.mark.parametrize("policy", ["prefix", "round_robin", "least_loaded"])
async def test_what_one_worker_fails_to_do_another_does(kind: str, policy: str, stream: bool) -> None:
    async with (
        serve_fake_sglang(mode="zero", num_workers=2) as fakes,
        routed(fakes.addresses, policy=policy) as router,
    ):
        fraction = {"fraction": 0.0} if kind == "reset" else {}
        await fakes.add_fault(kind, path="/generate", worker=0, **fraction)
        for _ in range(4):
            reply = await router.generate(stream=stream)
            assert reply.status == 200
            assert "error" not in reply.text
        # Nothing is counted for ever, whatever became of it.
        assert [at(router, address) for address in fakes.addresses] == [0, 0]
        assert (await counted(fakes, "/generate"))[1] == 4


@pytest.mark.parametrize("dies", [True, False])
@in_virtual_time
async def test_requests_at_a_worker_that_is_lost_end_elsewhere(dies: bool) -> None:
    async with (
        serve_fake_sglang(mode="scripted", num_workers=2) as fakes,
        routed(fakes.addresses, policy="round_robin", probe_timeout_seconds=0.5) as router,
    ):
        await fakes.extend_script(*[LONG] * 3, worker=0)
        asked = [asyncio.create_task(router.generate(num_tokens=7)) for _ in range(6)]
        await router.until(lambda: at(router, fakes.addresses[0]) == 3 and at(router, fakes.addresses[1]) == 0)
        if dies:
            fakes.kill(0)
        else:  # it takes requests and answers nothing any more
            await fakes.add_fault("hang", path="*", worker=0)
        assert [len(ids_of(await each)) for each in asked] == [7] * 6
        await router.until(lambda: router.fleet.members[fakes.addresses[0]].state.value == "down")
        health = await router.get("/health")
        assert (health.status, len(router.fleet.ready)) == (200, 1)


@in_virtual_time
async def test_when_all_are_full_the_client_is_told_to_come_again() -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG]) as fakes,
        routed(fakes.addresses, max_in_flight=1, wait_seconds=0.05) as router,
    ):
        first = asyncio.create_task(router.generate(rid="long"))
        await owner_of_the_only_request(fakes, router)
        full = await router.generate()
        assert (full.status, full.headers["Retry-After"]) == (429, "1")
        await router.post("/abort_request", rid="long")
        assert ids_of(await first) == [3, 1]
        await fakes.add_fault("status", status=429)
        refused = await router.generate()
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")


async def test_requests_that_wait_for_a_full_worker_are_given_to_it_when_it_is_free() -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG]) as fakes,
        routed(fakes.addresses, max_in_flight=1) as router,
    ):
        first = asyncio.create_task(router.generate(rid="long"))
        await owner_of_the_only_request(fakes, router)
        others = [asyncio.create_task(router.generate()) for _ in range(3)]
        await router.until(lambda: router.fleet.num_waiting == 3)
        await router.post("/abort_request", rid="long")
        assert [(await each).status for each in [first, *others]] == [200] * 4


async def test_two_places_that_come_free_at_once_are_both_taken() -> None:
    async with (
        serve_fake_sglang(mode="scripted", num_workers=2, script=[LONG, LONG]) as fakes,
        routed(fakes.addresses, max_in_flight=1) as router,
    ):
        asked = [asyncio.create_task(router.generate()) for _ in range(4)]
        for _ in range(2):
            await router.until(lambda: all(at(router, address) == 1 for address in fakes.addresses))
            for number in range(2):
                await fakes.wait_until(lambda stats: stats["num_running"] == 1, worker=number)
            for server in fakes.servers:  # in one turn of the event loop
                server.backend.abort(lambda _: True)
        assert [(await each).status for each in asked] == [200] * 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": "wanted"}),
        ("/abort_request", {"abort_all": True}),
        ("/abort_requests", {"request_ids": ["wanted"]}),
        ("/abort_requests", {}),
    ],
)
async def test_an_abort_reaches_the_owner_in_every_form(path: str, body: dict[str, Any]) -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG], num_workers=3) as fakes,
        routed(fakes.addresses) as router,
    ):
        asked = asyncio.create_task(router.generate(rid="wanted"))
        owner = await owner_of_the_only_request(fakes, router)
        assert (await router.ask("POST", path, body)).status == 200
        assert ids_of(await asked) == [3, 1]
        told = await counted(fakes, "/abort_request")
        assert told[owner] >= 1
        if "wanted" in str(body):
            assert sum(told) == told[owner], "one that is known is nobody else's"


async def test_an_unknown_id_is_aborted_at_all_workers_as_a_router_that_was_restarted_must() -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG], num_workers=2) as fakes,
        routed(fakes.addresses) as before,
        routed(fakes.addresses) as router,
    ):
        asked = asyncio.create_task(before.generate(rid="x"))
        await owner_of_the_only_request(fakes, before)
        await router.post("/abort_request", rid="x")
        assert ids_of(await asked) == [3, 1]
        assert await counted(fakes, "/abort_request") == [1, 1]


async def test_a_request_that_waits_here_is_aborted_here() -> None:
    async with serve_fake_sglang(mode="zero") as fakes, routed(fakes.addresses) as router:
        await router.post("/pause_generation", mode="in_place")
        asked = asyncio.create_task(router.generate(rid="early"))
        await router.until(lambda: router.fleet.num_waiting == 1)
        await router.post("/abort_request", rid="early")
        reply = await asked
        assert reply.status == 200
        assert reply.json["meta_info"]["finish_reason"]["type"] == "abort"
        assert ids_of(reply) == []
        assert await counted(fakes, "/generate") == [0]
        await router.post("/continue_generation")
        assert (await router.generate()).status == 200


async def test_a_client_that_hangs_up_ends_its_request_at_the_worker() -> None:
    async with serve_fake_sglang(mode="scripted", script=[LONG]) as fakes, routed(fakes.addresses) as router:
        asked = asyncio.create_task(router.generate(rid="gone"))
        await owner_of_the_only_request(fakes, router)
        asked.cancel()
        await fakes.wait_until(lambda stats: stats["num_running"] == 0)
        await router.until(lambda: not router.fleet.transfers)
        assert at(router, fakes.addresses[0]) == 0


async def test_sessions_keep_their_worker_and_keys_are_whole() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=4) as fakes, routed(fakes.addresses) as router:
        homes: dict[int, str] = {}
        for turn in range(3):
            for number in (1, 12, 2):
                key = {"X-SMG-Routing-Key": f"session-{number}"}
                reply = await router.generate([number + 100 * turn] * 20, headers=key)
                worker = reply.headers["X-Worker"]
                assert homes.setdefault(number, worker) == worker
        text = (await router.get("/metrics")).text
    assert 'rollfeed_router_choices_total{reason="session"} 6.0' in text


async def test_a_route_that_no_worker_has_is_not_found_after_all_were_asked() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        missing = await router.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert missing.status == 404
        assert "no worker has /v1/chat/completions" in missing.text
        assert await counted(fakes, "/v1/chat/completions") == [1, 1]
        other = await router.post("/inference/v1/generate", token_ids=[1])
        assert (other.status, await counted(fakes, "/inference/v1/generate")) == (404, [0, 0])


async def test_a_worker_that_has_never_answered_is_waited_for_once() -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        routed([*fakes.addresses, "http://127.0.0.1:9"], wait_seconds=DEADLINE_SECONDS) as router,
    ):
        assert (await router.generate()).status == 200
        silent = router.fleet.members["http://127.0.0.1:9"]
        loads = [{"worker": fakes.addresses[0], "load": 0}, {"worker": silent.address, "load": -1}]
        assert (await router.get("/get_loads")).json == {"workers": loads}
        asked = asyncio.create_task(router.post("/inference/v1/generate", token_ids=[1]))
        await router.until(lambda: router.fleet.num_waiting == 1)
        silent.joined_at -= DEADLINE_SECONDS
        router.fleet.changed()
        refused = await asked
        assert refused.status == 503
        assert "they are of kind sglang; http://127.0.0.1:9 has never answered" in refused.text


async def test_a_key_is_asked_of_clients_and_given_to_workers() -> None:
    async with (
        serve_fake_sglang(mode="zero", api_key="secret") as fakes,
        routed(fakes.addresses, key="secret") as router,
    ):
        assert (await router.generate()).status == 200
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{router.address}/generate", json={"input_ids": [1]}) as reply:
                assert reply.status == 401
                assert "Authorization" in await reply.text()
            async with session.get(f"{router.address}/health") as reply:
                assert reply.status == 200


async def test_an_abort_of_a_request_with_several_ids_ends_it_by_any_of_them_and_by_their_base() -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG] * 3) as fakes,
        routed(fakes.addresses) as router,
    ):
        for rid, told in (("a", "a_1"), ("b_0", "b"), ("c_0", "c_0")):
            asked = asyncio.create_task(router.generate(rid=rid))
            await router.until(lambda: at(router, fakes.addresses[0]) == 1)
            assert (await router.post("/abort_requests", request_ids=[told, "unknown_7"])).status == 200
            assert (await asked).json["meta_info"]["finish_reason"]["type"] == "abort"
        assert not router.fleet.owners
        assert not router.fleet.owned("b")


async def test_a_client_that_does_not_read_its_stream_loses_it_and_frees_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollfeed.router.forwarding._MOST_PIECES_BYTES", 1 << 20)
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        _flood() as (flood, began),
        routed(fakes.addresses, policy="round_robin") as router,
    ):
        member = router.fleet.members[fakes.addresses[0]]
        member.address = flood  # its requests go there
        body = json.dumps({"input_ids": [5], "stream": True}).encode()
        host, port = router.address.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await began.wait()
        await router.until(lambda: member.num_requests == 0)
        writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("content", [b"[" * 5000, b"no JSON", b'{"text": "\xff"}', b'{"meta_info": {}, "index": "x"}'])
async def test_a_reply_that_cannot_be_kept_goes_to_its_client_as_it_is(content: bytes, stream: bool) -> None:
    async def generate(request: web.Request) -> web.Response:
        await request.read()
        kind = "text/event-stream" if stream else "application/json"
        return web.Response(body=b"data: %b\n\n" % content if stream else content, content_type=kind)

    application = web.Application()
    application.add_routes([web.post("/generate", generate)])
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        serve_application(application, host="127.0.0.1", port=0) as address,
        routed(fakes.addresses, policy="round_robin", spans=SpanCache(CharTokenizer())) as router,
        aiohttp.ClientSession(router.address) as session,
    ):
        router.fleet.members[fakes.addresses[0]].address = address
        async with session.post("/generate", json={"text": "ab", "stream": stream}) as reply:
            assert reply.status == 200
            told = (await reply.read()).replace(b" ", b"")
            assert told.startswith((b"data:" if stream else b"") + content.replace(b" ", b""))


async def test_a_probe_asks_all_that_it_asks_on_one_connection() -> None:
    asked: list[asyncio.BaseTransport | None] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.transport)
        told = {"/v1/models": {"data": [{"id": "m"}]}, "/model_info": {"model_path": "m", "weight_version": "1"}}
        return web.json_response(told.get(request.path, {}))

    application = web.Application()
    application.add_routes([web.get("/{path:.*}", answer)])
    async with (
        serve_application(application, host="127.0.0.1", port=0) as address,
        routed([address], probe_seconds=3600.0) as router,
    ):
        assert router.fleet.members[address].is_at(1)
        num_asked, num_connections = len(asked), len(set(map(id, asked)))
    assert num_connections < num_asked, "as many connections as requests"
