"""SGLang's and vLLM's servers behind one router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.engine.openai.conftest import FakeVLLM, serving
from tests.router.routing_fakes import routed

from rollfeed.router.members import Member
from rollfeed.testing.fake_sglang import serve_fake_sglang

TOKENS = "/inference/v1/generate"
PARAMS: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0}
DISK = "/update_weights_from_disk"


@asynccontextmanager
async def fake_vllm(**changes: Any) -> AsyncIterator[FakeVLLM]:
    server = FakeVLLM()
    for name, value in changes.items():
        setattr(server, name, value)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await server.handle(request)

    async with serving(handle) as address:
        server.address = address
        yield server


def ask(rid: str = "r") -> dict[str, Any]:
    return {"request_id": rid, "token_ids": [1, 2, 3], "sampling_params": {**PARAMS, "logprobs": 0}}


async def test_each_route_goes_to_the_kind_that_has_it() -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        fake_vllm(gauges=(3, 2)) as vllm,
        routed([*fakes.addresses, vllm.address]) as router,
    ):
        workers = await router.workers()
        assert workers[vllm.address]["kind"] == "vllm"
        assert (workers[vllm.address]["num_running"], workers[vllm.address]["num_waiting"]) == (3, 2)
        for _ in range(3):
            assert (await router.generate()).headers["X-Worker"] == fakes.addresses[0]
            reply = await router.post(TOKENS, **ask())
            assert (reply.status, reply.headers["X-Worker"]) == (200, vllm.address)
            # The fake SGLang has no such route: it is asked once at most.
            assert (await router.post("/v1/completions", model="m", prompt=[1, 2], **PARAMS)).status == 200
        assert (await fakes.stats())["requests"].get("/v1/completions", 0) <= 1


async def test_a_folder_is_loaded_by_all_kinds_or_by_none() -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        fake_vllm(weight_version="0") as vllm,
        routed([*fakes.addresses, vllm.address]) as router,
    ):
        assert (await router.post(DISK, model_path="/w/1", weight_version="1")).status == 200
        assert (fakes.servers[0].weight_version, vllm.weight_version) == ("1", "1")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": "/w/1"}}
        assert ("/collective_rpc", reload) in vllm.calls
        vllm.update_status = 500
        failed = await router.post(DISK, model_path="/w/2", weight_version="2")
        assert failed.status == 503
        assert fakes.servers[0].weight_version == "1"
        assert router.fleet.policy_version == 1
        vllm.update_status = 200
        await router.until(lambda: len(router.fleet.ready) == 2)
        assert vllm.weight_version == "1"


async def test_an_update_of_one_kind_is_refused_where_there_is_another() -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        fake_vllm() as vllm,
        routed([*fakes.addresses, vllm.address]) as router,
    ):
        refused = await router.post("/begin_weight_update")
        assert refused.status == 400
        assert "/begin_weight_update is of sglang only" in refused.text
        assert router.fleet.closed_by is None


async def test_an_abort_reaches_a_vllm_without_a_route_for_it_by_closing() -> None:
    async with fake_vllm(hold_after=2) as vllm, routed([vllm.address]) as router:
        asked = asyncio.create_task(router.post(TOKENS, **ask("wanted")))
        await router.until(lambda: vllm.holding == 1)
        assert (await router.post("/abort_request", rid="wanted")).status == 200
        assert (await asked).status == 499
        await router.until(lambda: vllm.closed == 1)
        assert (await router.get("/health")).status == 200


@pytest.mark.parametrize("body", [{"rid": "wanted"}, {"request_ids": ["wanted"]}])
async def test_an_abort_reaches_the_vllm_that_has_the_request_and_no_other(body: dict[str, Any]) -> None:
    told: list[tuple[FakeVLLM, Any]] = []

    def takes_aborts(server: FakeVLLM) -> None:
        handle = server.handle

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path != "/abort_requests":
                return await handle(request)
            told.append((server, (await request.json())["request_ids"]))
            server.release.set()
            return web.Response()

        server.handle = answer  # type: ignore[method-assign]

    async with (
        fake_vllm(hold_after=2) as one,
        fake_vllm(hold_after=2) as other,
        routed([one.address, other.address]) as router,
    ):
        takes_aborts(one)
        takes_aborts(other)
        asked = asyncio.create_task(router.post(TOKENS, **ask("wanted")))
        await router.until(lambda: one.holding + other.holding == 1)
        owner = one if one.holding else other
        path = "/abort_request" if "rid" in body else "/abort_requests"
        assert (await router.post(path, **body)).status == 200
        reply = await asked
        assert (reply.status, reply.headers["X-Worker"]) == (200, owner.address)
        assert told
        assert all(each == (owner, ["wanted"]) for each in told)


async def test_a_vllm_that_keeps_no_name_is_given_the_weights_when_it_was_lost() -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        fake_vllm() as vllm,
        routed([*fakes.addresses, vllm.address]) as router,
    ):
        await router.post(DISK, model_path="/w/1", weight_version="1")
        assert (await router.workers())[vllm.address]["policy_version"] == 1
        before = len(vllm.calls)
        router.fleet.members[vllm.address].is_suspect = True  # as when a connection to it has failed
        await router.until(lambda: any(path == "/collective_rpc" for path, _ in vllm.calls[before:]))
        await router.until(lambda: router.fleet.members[vllm.address].is_at(1))


SGLANG_TOLD: dict[str, Any] = {
    "/model_info": {"model_path": "m", "weight_version": "default"},
    "/v1/models": {"data": [{"id": "m"}]},
    "/v1/loads": {"loads": []},
    "/server_info": {},
    "/health": {},
    "/generate": {"text": ""},
}


def as_sglang(path: str) -> web.Response:
    return web.json_response(SGLANG_TOLD[path]) if path in SGLANG_TOLD else web.Response(status=404)


async def test_a_worker_that_returns_as_another_kind_is_met_again() -> None:
    vllm, is_sglang = FakeVLLM(), True

    async def answer(request: web.Request) -> web.StreamResponse:
        return as_sglang(request.path) if is_sglang else await vllm.handle(request)

    async with serving(answer) as address, routed([address]) as router:
        assert (await router.generate()).status == 200
        member = router.fleet.members[address]
        for kind in ("vllm", "sglang"):
            is_sglang = kind == "sglang"
            # Its old kind has other routes; a vLLM of which nothing was lost is not asked for them.
            member.is_suspect = is_sglang
            await router.until(lambda kind=kind: member.kind == kind)
            await router.until(lambda: len(router.fleet.ready) == 1)
            assert (await router.post(TOKENS, **ask())).status == (404 if is_sglang else 200)
            assert (await router.generate()).status == (200 if is_sglang else 404)


async def test_a_worker_that_is_lost_in_the_middle_of_a_probe_is_met_again() -> None:
    vllm, is_sglang, probed = FakeVLLM(), False, list[Member]()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal is_sglang
        if probed and request.path == "/metrics":  # the last that a vLLM is asked
            is_sglang = probed.pop().is_suspect = True
        return as_sglang(request.path) if is_sglang else await vllm.handle(request)

    async with serving(answer) as address, routed([address]) as router:
        probed.append(router.fleet.members[address])
        await router.until(lambda: router.fleet.members[address].kind == "sglang")


async def test_ranks_of_a_group_follow_each_other() -> None:
    told: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if request.path == "/get_world_size":
            return web.json_response({"world_size": 2})
        if request.path == "/init_weight_transfer_engine":
            told[str(request.url.port)] = (await request.json())["init_info"]["rank_offset"]
            return web.json_response({})
        return web.Response(status=200 if request.path == "/health" else 404)

    async with serving(answer) as first, serving(answer) as second, routed([first, second]) as router:
        body = {"init_info": {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 5}}
        assert (await router.post("/init_weight_transfer_engine", **body)).status == 200
    assert [told[address.rpartition(":")[2]] for address in (first, second)] == [1, 3]
