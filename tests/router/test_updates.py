"""Weights of a fleet change as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp import web
from tests.engine.openai.conftest import serving
from tests.router.routing_fakes import Routed, routed

from rollfeed.base.serving import serve_application
from rollfeed.testing.fake_sglang import Fakes, ScriptedReply, serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time

LONG = ScriptedReply(output_ids=[3, 1, 2], delay_seconds=1000.0, num_tokens_when_aborted=2)
DISK = "/update_weights_from_disk"


async def versions(fakes: Fakes) -> list[str]:
    return [(await fakes.stats(number))["weight_version"] for number in range(len(fakes.addresses))]


def states(router: Routed, fakes: Fakes) -> Sequence[str]:
    return [router.fleet.members[address].state.value for address in fakes.addresses]


async def test_all_workers_load_a_folder_and_the_next_reply_has_its_version() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=3) as fakes, routed(fakes.addresses) as router:
        told = await router.post(DISK, model_path="/w/7", weight_version="7")
        assert (told.status, told.json["success"]) == (200, True)
        assert await versions(fakes) == ["7"] * 3
        assert (await router.generate()).json["meta_info"]["weight_version"] == "7"
        assert (await router.get("/workers")).json["policy_version"] == 7
        # Without a name it is the next one.
        assert (await router.post(DISK, model_path="/w/8")).status == 200
        assert await versions(fakes) == ["8"] * 3


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({}, 400, "model_path is missing"),
        ({"model_path": "/w", "weight_version": "4"}, 409, "versions never go down"),
        ({"model_path": "/w", "weight_version": "2026-01-01"}, 400, "no policy version"),
    ],
)
async def test_what_cannot_be_the_next_version_is_refused_and_reaches_nobody(
    body: dict[str, str], status: int, told: str
) -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        await router.post(DISK, model_path="/w/5", weight_version="5")
        refused = await router.post(DISK, **body)
        assert refused.status == status
        assert told in refused.text
        assert await versions(fakes) == ["5", "5"]
        assert (await router.generate()).status == 200


@pytest.mark.parametrize("status", [400, 500])
async def test_when_one_worker_fails_all_go_back_to_the_old_version(status: int) -> None:
    async with serve_fake_sglang(mode="zero", num_workers=3) as fakes, routed(fakes.addresses) as router:
        await router.post(DISK, model_path="/w/1", weight_version="1")
        await fakes.add_fault("status", status=status, path=DISK, times=1, worker=1, message="no such folder")
        failed = await router.post(DISK, model_path="/w/2", weight_version="2")
        assert failed.status == 503
        assert "version 1 stays" in failed.text
        assert "no such folder" in failed.text
        assert await versions(fakes) == ["1"] * 3
        assert states(router, fakes) == ["ready"] * 3
        assert (await router.generate()).json["meta_info"]["weight_version"] == "1"
        assert (await router.post(DISK, model_path="/w/2", weight_version="2")).status == 200


async def test_a_worker_that_cannot_go_back_is_out_until_it_has_loaded_what_is_served() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=3) as fakes, routed(fakes.addresses) as router:
        await router.post(DISK, model_path="/w/1", weight_version="1")
        # The second worker fails; the first one has the new weights, and cannot load anything for a while.
        await fakes.add_fault("status", status=400, path=DISK, times=1, worker=1)
        await fakes.add_fault("status", status=500, path=DISK, skip=1, worker=0)
        assert (await router.post(DISK, model_path="/w/2", weight_version="2")).status == 503
        assert states(router, fakes)[0] == "out"
        for _ in range(6):
            reply = await router.generate()
            assert reply.json["meta_info"]["weight_version"] == "1"
            assert reply.headers["X-Worker"] != fakes.addresses[0]
        await fakes.clear_faults()
        await router.until(lambda: states(router, fakes) == ["ready"] * 3)
        assert await versions(fakes) == ["1"] * 3


async def test_a_worker_that_has_died_has_no_say() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=3) as fakes, routed(fakes.addresses) as router:
        fakes.kill(1)
        told = await router.post(DISK, model_path="/w/1", weight_version="1")
        assert (told.status, states(router, fakes)) == (200, ["ready", "down", "ready"])
        await fakes.servers[1].restart()
        # It comes back with its first weights, and is given the current ones before it has requests.
        await router.until(lambda: states(router, fakes) == ["ready"] * 3)
        assert await versions(fakes) == ["1"] * 3


async def test_the_word_of_a_worker_that_was_lost_in_a_failed_update_does_not_count() -> None:
    version, folders, is_lost = "default", list[str](), False

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal version, is_lost
        if request.path == DISK and not is_lost:
            body = await request.json()
            folders.append(body["model_path"])
            version, is_lost = body["weight_version"], body["model_path"] == "/w/2"
        if is_lost:
            return web.Response(status=500)
        told = {
            DISK: {"success": True},
            "/model_info": {"model_path": folders[-1] if folders else "m", "weight_version": version},
            "/v1/models": {"data": [{"id": "m"}]},
            "/health": {},
        }
        return web.json_response(told[request.path]) if request.path in told else web.Response(status=404)

    async with (
        serve_fake_sglang(mode="zero") as fakes,
        serving(answer) as address,
        routed([*fakes.addresses, address]) as router,
    ):
        assert (await router.post(DISK, model_path="/w/1", weight_version="1")).status == 200
        await fakes.add_fault("status", status=400, path=DISK, times=1)
        assert (await router.post(DISK, model_path="/w/2", weight_version="2")).status == 503
        member = router.fleet.members[address]
        assert (member.state, version) == ("down", "2")
        is_lost = False
        await router.until(lambda: len(router.fleet.ready) == 2)
        assert (router.fleet.policy_version, folders) == (1, ["/w/1", "/w/2", "/w/1"])
        assert await versions(fakes) == ["1"]


async def test_running_requests_end_before_weights_change_and_later_ones_wait() -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG], num_workers=2) as fakes,
        routed(fakes.addresses) as router,
    ):
        running = asyncio.create_task(router.generate(rid="running"))
        await router.until(lambda: any(member.num_requests for member in router.fleet))
        owner = next(n for n, each in enumerate(fakes.addresses) if router.fleet.members[each].num_requests)
        await fakes.wait_until(lambda stats: stats["num_running"] == 1, worker=owner)
        update = asyncio.create_task(router.post(DISK, model_path="/w/1", weight_version="1"))
        await router.until(lambda: router.fleet.closed_by is not None)
        later = asyncio.create_task(router.generate())
        await router.until(lambda: router.fleet.num_waiting == 1)
        assert await versions(fakes) == ["default"] * 2
        await router.post("/abort_request", rid="running")
        assert (await running).json["meta_info"]["weight_version"] == "default"
        assert (await update).status == 200
        assert (await later).json["meta_info"]["weight_version"] == "1"


@in_virtual_time
async def test_an_update_that_may_abort_does_and_one_that_may_not_gives_up() -> None:
    async with (
        serve_fake_sglang(mode="scripted", script=[LONG]) as fakes,
        routed(fakes.addresses, update_seconds=0.1) as router,
    ):
        running = asyncio.create_task(router.generate())
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        refused = await router.post(DISK, model_path="/w/1", weight_version="1")
        assert refused.status == 503
        assert "abort_all_requests: true" in refused.text
        assert await versions(fakes) == ["default"]
    async with serve_fake_sglang(mode="scripted", script=[LONG]) as fakes, routed(fakes.addresses) as router:
        running = asyncio.create_task(router.generate())
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        assert (await router.post(DISK, model_path="/w/1", weight_version="1", abort_all_requests=True)).status == 200
        assert (await running).json["output_ids"] == [3, 1]


async def test_a_worker_that_joins_with_old_weights_is_given_the_current_ones() -> None:
    async with (
        serve_fake_sglang(mode="zero", num_workers=2) as fakes,
        serve_fake_sglang(mode="zero") as others,
        routed(fakes.addresses) as router,
    ):
        await router.post(DISK, model_path="/w/3", weight_version="3")
        for path in ("/workers", f"/add_worker?url={others.address}"):
            joined = await router.post(path, **({} if "?" in path else {"url": others.address}))
            assert joined.status in (200, 202)
            await router.until(lambda: router.fleet.members[others.address].is_at(3))
            assert await versions(others) == ["3"]
        assert (await router.ask("POST", f"/remove_worker?url={others.address}")).status == 200
        assert others.address not in await router.workers()


async def test_a_worker_whose_weights_are_old_is_kept_out_where_no_folder_is_known() -> None:
    async with (
        serve_fake_sglang(mode="zero") as new,
        serve_fake_sglang(mode="zero") as old,
    ):
        async with routed(new.addresses) as before:
            await before.post("/update_weight_version", new_version="4")
        async with routed([*new.addresses, *old.addresses]) as router:
            await router.until(lambda: "folder is not known" in router.fleet.members[old.address].reason)
            assert (await router.workers())[old.address]["is_healthy"] is False
            for _ in range(4):
                assert (await router.generate()).json["meta_info"]["weight_version"] == "4"


async def test_a_session_of_tensors_is_one_update() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        assert (await router.post("/begin_weight_update")).status == 200
        asked = asyncio.create_task(router.generate())
        await router.until(lambda: router.fleet.num_waiting == 1)
        bucket = {"serialized_named_tensors": ["gAU="], "weight_version": "6"}
        for _ in range(2):
            assert (await router.post("/update_weights_from_tensor", **bucket)).status == 200
        assert router.fleet.num_waiting == 1
        assert (await router.post("/end_weight_update")).status == 200
        assert (await asked).json["meta_info"]["weight_version"] == "6"
        assert (await router.post(DISK, model_path="/w/5", weight_version="5")).status == 409


async def test_tensors_that_one_worker_does_not_take_leave_it_out_and_the_new_version_stands() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=3) as fakes, routed(fakes.addresses) as router:
        await router.post("/begin_weight_update")
        await fakes.add_fault("status", status=500, path="/update_weights_from_tensor", worker=2)
        told = await router.post("/update_weights_from_tensor", serialized_named_tensors=["gAU="], weight_version="1")
        assert told.status == 503
        assert (await router.post("/end_weight_update")).status == 200
        assert states(router, fakes) == ["ready", "ready", "out"]
        for _ in range(4):
            assert (await router.generate()).json["meta_info"]["weight_version"] == "1"


@in_virtual_time
async def test_an_update_that_nobody_finishes_takes_its_workers_out() -> None:
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        routed(fakes.addresses, update_seconds=0.1, wait_seconds=0.5) as router,
    ):
        await router.post("/begin_weight_update")
        await router.until(lambda: states(router, fakes) == ["out"])
        refused = await router.generate()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert "not finished within 0.1 s" in refused.text


async def test_weights_that_somebody_publishes_past_the_router_are_seen_and_older_ones_get_nothing() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        fakes.servers[1].set_version("9")
        await router.until(lambda: router.fleet.policy_version == 9)
        for _ in range(4):
            assert (await router.generate()).json["meta_info"]["weight_version"] == "9"
        await router.until(lambda: states(router, fakes)[0] == "behind")
        fakes.servers[0].set_version("9")
        await router.until(lambda: states(router, fakes) == ["ready", "ready"])


async def test_a_reply_of_older_weights_is_seen_by_nobody() -> None:
    async with (
        serve_fake_sglang(mode="zero", num_workers=2) as fakes,
        routed(fakes.addresses, probe_seconds=3600.0) as router,
    ):
        await router.post(DISK, model_path="/w/2", weight_version="2")
        # As one that was started again between two probes.
        fakes.servers[0].set_version("1")
        for _ in range(6):
            assert (await router.generate()).json["meta_info"]["weight_version"] == "2"


async def test_a_worker_that_others_publish_to_is_left_to_them_for_a_while_and_brought_along_later() -> None:
    body = {"model_path": "/w/5", "weight_version": "5"}
    for seconds, is_told in ((3600.0, False), (0.05, True)):
        async with (
            serve_fake_sglang(mode="zero", num_workers=2) as fakes,
            routed(fakes.addresses, late_seconds=seconds) as router,
            aiohttp.ClientSession() as session,
        ):
            async with session.post(fakes.addresses[0] + DISK, json=body) as reply:
                assert reply.status == 200
            if is_told:
                await router.until(lambda: router.fleet.policy_version == 5 and len(router.fleet.ready) == 2)
                assert await versions(fakes) == ["5", "5"]
                continue
            await router.until(lambda: states(router, fakes)[1] == "behind")
            assert (await fakes.stats(1))["requests"].get(DISK, 0) == 0
            async with session.post(fakes.addresses[1] + DISK, json=body) as reply:
                assert reply.status == 200
            await router.until(lambda: len(router.fleet.ready) == 2)


async def test_whole_weights_make_a_worker_good_again_that_was_out() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        bucket = {"serialized_named_tensors": ["gAU="]}
        await fakes.add_fault("status", status=500, path="/update_weights_from_tensor", worker=1, times=1)
        for version, expected in (("1", ["ready", "out"]), ("2", ["ready", "ready"])):
            await router.post("/begin_weight_update")
            await router.post("/update_weights_from_tensor", **bucket, weight_version=version)
            await router.post("/end_weight_update")
            assert states(router, fakes) == expected
        assert await versions(fakes) == ["2", "2"]


async def test_an_update_goes_to_its_end_though_whoever_asked_for_it_leaves() -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        await fakes.add_fault("delay", seconds=1.0, path=DISK, worker=1, times=1)
        asked = asyncio.create_task(router.post(DISK, model_path="/w/3", weight_version="3"))
        await fakes.wait_until(lambda stats: stats["weight_version"] == "3", worker=0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        # Until it has ended one worker has the new weights and one the old ones.
        for _ in range(4):
            assert (await router.generate()).json["meta_info"]["weight_version"] == "3"
        assert await versions(fakes) == ["3", "3"]
        assert states(router, fakes) == ["ready", "ready"]


async def test_requests_are_admitted_again_when_whoever_begins_an_update_leaves_before_it_has_begun() -> None:
    async with serve_fake_sglang(mode="scripted", script=[LONG]) as fakes, routed(fakes.addresses) as router:
        running = asyncio.create_task(router.generate(rid="running"))
        await fakes.wait_until(lambda stats: stats["num_running"] == 1)
        asked = asyncio.create_task(router.post("/begin_weight_update"))
        await router.until(lambda: router.fleet.closed_by is not None)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await router.until(lambda: router.fleet.closed_by is None)
        await router.post("/abort_request", rid="running")
        assert (await running).json["output_ids"] == [3, 1]


@pytest.mark.parametrize("path", [DISK, "/update_weights_from_tensor"])
async def test_the_word_of_a_worker_with_half_of_an_update_does_not_count(path: str) -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2) as fakes, routed(fakes.addresses) as router:
        await fakes.add_fault("status", status=500, path=path, worker=1)
        if path == DISK:  # without a name it is the next one
            await router.post(path, model_path="/w/1")
            fakes.servers[1].set_version("1")
        else:  # the name comes after the beginning
            await router.post("/begin_weight_update")
            await router.post(path, serialized_named_tensors=["gAU="], weight_version="7")
            await router.post("/end_weight_update")
            fakes.servers[1].set_version("7")
        num_probes = (await fakes.stats(1))["requests"]["/model_info"]
        await fakes.wait_until(lambda stats: stats["requests"]["/model_info"] >= num_probes + 3, worker=1)
        assert states(router, fakes) == ["ready", "out"]


async def test_a_call_of_an_update_cannot_name_an_older_version_than_is_served() -> None:
    async with serve_fake_sglang(mode="zero") as fakes, routed(fakes.addresses) as router:
        await router.post(DISK, model_path="/w/5", weight_version="5")
        await router.post("/begin_weight_update")
        bucket = {"serialized_named_tensors": ["gAU="]}
        refused = await router.post("/update_weights_from_tensor", **bucket, weight_version="4")
        assert (refused.status, await versions(fakes)) == (409, ["5"])
        assert (await router.post("/update_weights_from_tensor", **bucket, weight_version="6")).status == 200
        assert (await router.post("/end_weight_update")).status == 200
        assert (await router.generate()).json["meta_info"]["weight_version"] == "6"


async def test_an_older_version_whose_name_comes_in_two_pieces_of_a_stream_is_seen() -> None:
    has_first = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text":"a","meta_info":{"weight_ver')
        await has_first.wait()
        await response.write(b'sion":"1","finish_reason":null}}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response

    application = web.Application()
    application.add_routes([web.post("/generate", generate)])
    async with (
        serve_fake_sglang(mode="zero") as fakes,
        serve_application(application, host="127.0.0.1", port=0) as stale,
        routed(fakes.addresses, policy="round_robin", probe_seconds=3600.0) as router,
        aiohttp.ClientSession() as session,
    ):
        await router.post(DISK, model_path="/w/2", weight_version="2")
        router.fleet.members[fakes.addresses[0]].address = stale  # its requests go there
        async with session.post(f"{router.address}/generate", json={"input_ids": [5], "stream": True}) as reply:
            first = await reply.content.readany()
            assert first.endswith(b"weight_ver")
            has_first.set()
            rest = await reply.content.read()
        assert b"older weights" in rest
        assert router.fleet.counters["stale_replies"] == 1
