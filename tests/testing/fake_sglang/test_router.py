"""The router in both dialects."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollfeed.testing.fake_sglang import ScriptedReply, serve_fake_router, serve_fake_sglang

HELD = ScriptedReply(output_ids=[7], delay_seconds=3600)


async def test_the_old_dialect_lists_adds_and_removes(client: Any) -> None:
    async with serve_fake_sglang(num_workers=2, router="old") as fakes:
        router = fakes.router_address
        assert await client.get(f"{router}/list_workers") == {"urls": list(fakes.addresses)}
        await client.post(f"{router}/remove_worker?url={fakes.addresses[0]}")
        await client.post(f"{router}/add_worker?url=http%3A%2F%2F127.0.0.1%3A9")
        assert await client.get(f"{router}/list_workers") == {"urls": [fakes.addresses[1], "http://127.0.0.1:9"]}
        await client.post(f"{router}/add_worker?url=http://127.0.0.1:9", status=400)
        await client.post(f"{router}/add_worker", status=400)
        for path in ("/workers", "/workers/x"):
            await client.get(router + path, status=404)


async def test_the_new_dialect_lists_adds_and_removes(client: Any) -> None:
    async with serve_fake_sglang(num_workers=2, router="new") as fakes:
        router = fakes.router_address
        workers = (await client.get(f"{router}/workers"))["workers"]
        assert [worker["url"] for worker in workers] == list(fakes.addresses)
        gone = workers[0]["id"]
        async with client.session.delete(f"{router}/workers/{gone}") as response:
            assert response.status == 202
        added = await client.post(f"{router}/workers", {"url": "http://127.0.0.1:9"}, status=202)
        assert (await client.get(f"{router}/workers/{added['worker_id']}"))["url"] == "http://127.0.0.1:9"
        listed = (await client.get(f"{router}/workers"))["workers"]
        assert [worker["url"] for worker in listed] == [fakes.addresses[1], "http://127.0.0.1:9"]
        await client.get(f"{router}/workers/{gone}", status=404)
        assert await client.post(f"{router}/workers", {"url": "http://127.0.0.1:9/"}, status=202) == added
        await client.post(f"{router}/workers", {}, status=400)
        await client.get(f"{router}/list_workers", status=404)


@pytest.mark.parametrize("dialect", ["old", "new"])
async def test_aborts_are_not_forwarded(client: Any, dialect: str) -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD], router=dialect) as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address, top={"rid": "r"}))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await client.post(f"{fakes.router_address}/abort_request", {"rid": "r"}, status=404)
        assert (await fakes.stats())["num_running"] == 1
        await client.post(f"{fakes.addresses[0]}/abort_request", {"rid": "r"})
        assert (await asked)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_least_loaded_worker_is_chosen(client: Any) -> None:
    async with serve_fake_sglang(mode="scripted", num_workers=3, router="new", script=[HELD]) as fakes:
        asked = [asyncio.ensure_future(client.generate(fakes.address)) for _ in range(3)]
        for worker in range(3):
            await fakes.wait_until(lambda counts: counts["num_running"] == 1, worker=worker)
        await client.post(f"{fakes.addresses[1]}/abort_request", {"abort_all": True})
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(4):
            await client.generate(fakes.address, max_new_tokens=1)
        assert [(await fakes.stats(worker))["requests"]["/generate"] for worker in range(3)] == [1, 5, 1]
        for task in asked:
            task.cancel()


async def test_round_robin_takes_turns(client: Any) -> None:
    async with serve_fake_sglang(num_workers=3, router="old", policy="round_robin") as fakes:
        for _ in range(6):
            await client.generate(fakes.address, max_new_tokens=1)
        assert [(await fakes.stats(worker))["requests"]["/generate"] for worker in range(3)] == [2, 2, 2]
        assert (await fakes.stats(fakes.router_address))["forwarded"] == dict.fromkeys(fakes.addresses, 2)


async def test_replies_errors_and_streams_pass_unchanged(client: Any) -> None:
    async with serve_fake_sglang(router="new", context_length=100) as fakes:
        assert len((await client.generate(fakes.address, max_new_tokens=5))["output_ids"]) == 5
        error = await client.generate(fakes.address, max_new_tokens=-5, status=400)
        assert "max_new_tokens" in error["error"]["message"]
        assert len((await client.events(fakes.address, max_new_tokens=5))[-1]["output_ids"]) == 5
        assert (await client.get(f"{fakes.address}/get_model_info"))["weight_version"] == "default"
        assert await client.get(f"{fakes.address}/health") == ""


async def test_a_dead_worker_is_502_and_none_at_all_503(client: Any) -> None:
    async with serve_fake_sglang() as fakes, serve_fake_router(fakes.addresses, dialect="old") as router:
        fakes.kill()
        error = await client.generate(router.address, max_new_tokens=1, status=502)
        assert fakes.addresses[0] in error["error"]["message"]
        await client.post(f"{router.address}/remove_worker?url={fakes.addresses[0]}")
        await client.generate(router.address, max_new_tokens=1, status=503)


async def test_a_client_that_leaves_the_router_leaves_the_worker(client: Any) -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD], router="old") as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        asked.cancel()
        await fakes.wait_until(lambda counts: counts["num_running"] == 0)
        assert (await fakes.stats(fakes.router_address))["open"] == {fakes.addresses[0]: 0}


async def test_routers_have_faults_of_their_own(client: Any) -> None:
    async with serve_fake_sglang(router="old") as fakes:
        await fakes.add_fault("status", status=503, times=1, worker=fakes.router_address)
        await client.generate(fakes.address, max_new_tokens=1, status=503)
        await client.generate(fakes.address, max_new_tokens=1)
        assert (await fakes.stats(fakes.router_address))["faults"] == {"status": 1}
        assert (await fakes.stats())["faults"] == {}
