"""Each fault as a plain client meets it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.testing.fake_sglang.conftest import plain_client

from rollfeed.errors import ConfigError
from rollfeed.testing.fake_sglang import FaultBook, FaultKind, ScriptedReply, ServerFault, serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time

HELD = ScriptedReply(output_ids=[7, 8, 9], delay_seconds=3600)


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_status_answers_with_an_error_the_next_times_only(client: Any, status: int) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("status", status=status, times=2, message="not now")
        for _ in range(2):
            error = await client.generate(fakes.address, max_new_tokens=3, status=status)
            assert error == {"error": {"message": "not now"}}
        assert len((await client.generate(fakes.address, max_new_tokens=3))["output_ids"]) == 3
        assert (await fakes.stats())["faults"] == {"status": 2}


async def test_hang_never_answers_and_holds_nothing_else_up(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("hang", times=1)
        hanging = asyncio.ensure_future(client.generate(fakes.address, max_new_tokens=3))
        await fakes.wait_until(lambda counts: counts["faults"] == {"hang": 1})
        await client.generate(fakes.address, max_new_tokens=3)
        assert not hanging.done()
        hanging.cancel()


async def test_hang_drops_the_connection_after_its_seconds(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("hang", seconds=0.01)
        with pytest.raises(aiohttp.ClientError):
            await client.generate(fakes.address, max_new_tokens=3)


async def test_reset_ends_the_connection_within_the_body(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("reset", times=1, fraction=0.5)
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4000}}
        async with client.session.post(fakes.address + "/generate", json=body) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await client.generate(fakes.address, max_new_tokens=3)


async def test_reset_of_fraction_0_sends_nothing(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("reset", fraction=0.0)
        with pytest.raises((aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)):
            await client.generate(fakes.address, max_new_tokens=3)


async def test_truncated_json_is_a_whole_reply_of_half_a_body(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("truncated_json")
        with pytest.raises(json.JSONDecodeError):
            await client.generate(fakes.address, max_new_tokens=3)


async def test_wrong_logprob_count_lacks_one(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("wrong_logprob_count")
        reply = await client.generate(fakes.address, max_new_tokens=3)
        samples = await client.generate(fakes.address, max_new_tokens=3, n=2)
    for each in (reply, *samples):
        assert (len(each["output_ids"]), len(each["meta_info"]["output_token_logprobs"])) == (3, 2)


async def test_missing_finish_reason_lacks_the_key(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("missing_finish_reason")
        meta = (await client.generate(fakes.address, max_new_tokens=3))["meta_info"]
    assert "finish_reason" not in meta
    assert len(meta["output_token_logprobs"]) == 3


async def test_stale_version_names_the_one_before(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("stale_version", times=1)
        for version in ("v1", "v2"):
            await client.post(fakes.address + "/update_weight_version", {"new_version": version})
        versions = [
            (await client.generate(fakes.address, max_new_tokens=1))["meta_info"]["weight_version"] for _ in range(2)
        ]
    assert versions == ["v1", "v2"]


async def test_slow_health_answers_late_and_generation_goes_on(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("slow_health", seconds=3600, times=1)
        asked = asyncio.ensure_future(client.get(fakes.address + "/health"))
        await fakes.wait_until(lambda counts: counts["faults"] == {"slow_health": 1})
        await client.generate(fakes.address, max_new_tokens=3)
        assert await client.get(fakes.address + "/health") == ""
        assert not asked.done()
        asked.cancel()


async def test_delay_answers_after_its_seconds(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("delay", seconds=0.01, path="/model_info")
        assert (await client.get(fakes.address + "/model_info"))["weight_version"] == "default"
        assert (await fakes.stats())["faults"] == {"delay": 1}


async def test_slow_abort_answers_at_once_and_aborts_later(client: Any) -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD, HELD]) as fakes:
        await fakes.add_fault("slow_abort", seconds=3600, times=1)
        asked = asyncio.ensure_future(client.generate(fakes.address, top={"rid": "r"}))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await client.post(fakes.address + "/abort_request", {"rid": "r"})
        assert (await fakes.stats())["num_running"] == 1
        await client.post(fakes.address + "/abort_request", {"rid": "r"})
        assert (await asked)["meta_info"]["finish_reason"]["type"] == "abort"
        await fakes.add_fault("slow_abort", seconds=0.01)
        asked = asyncio.ensure_future(client.generate(fakes.address))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await client.post(fakes.address + "/abort_request", {"abort_all": True})
        assert (await asked)["meta_info"]["finish_reason"]["type"] == "abort"


@in_virtual_time
async def test_refuse_drops_what_runs_and_listens_again_after_its_seconds() -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD]) as fakes, plain_client() as client:
        asked = asyncio.ensure_future(client.generate(fakes.address))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await fakes.add_fault("refuse", seconds=0.3)
        with pytest.raises(aiohttp.ClientError):
            await asked
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(fakes.address + "/health")
        await asyncio.sleep(0.4)
        await client.generate(fakes.address, max_new_tokens=1)


async def test_refuse_with_a_path_waits_for_a_request(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("refuse", path="/generate", skip=1)
        await client.generate(fakes.address, max_new_tokens=1)
        with pytest.raises(aiohttp.ClientError):
            await client.generate(fakes.address, max_new_tokens=1)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(fakes.address + "/health")


async def test_one_of_several_servers_dies_alone(client: Any) -> None:
    async with serve_fake_sglang(num_workers=2) as fakes:
        await fakes.add_fault("die", worker=0, path="/generate")
        with pytest.raises(aiohttp.ClientError):
            await client.generate(fakes.addresses[0], max_new_tokens=1)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(fakes.addresses[0] + "/health")
        await client.generate(fakes.addresses[1], max_new_tokens=1)


async def test_faults_spoil_streams_too(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        await fakes.add_fault("missing_finish_reason", times=1)
        (event,) = await client.events(fakes.address, max_new_tokens=2)
        assert "finish_reason" not in event["meta_info"]
        await fakes.add_fault("truncated_json", times=1)
        with pytest.raises(json.JSONDecodeError):
            await client.events(fakes.address, max_new_tokens=2)
        await fakes.add_fault("reset", times=1)
        with pytest.raises(aiohttp.ClientError):
            await client.events(fakes.address, max_new_tokens=2)
        await client.events(fakes.address, max_new_tokens=2)


async def test_faults_are_listed_and_cleared_and_wrong_ones_refused(client: Any) -> None:
    async with serve_fake_sglang(num_workers=2, faults=[{"kind": "hang"}]) as fakes:
        await fakes.clear_faults(worker=0)
        assert await client.get(fakes.addresses[0] + "/fault") == []
        assert [fault["kind"] for fault in await client.get(fakes.addresses[1] + "/fault")] == ["hang"]
        error = await client.post(fakes.address + "/fault", {"kind": "hang", "probability": 2}, status=400)
        assert "probability" in error["error"]["message"]
        error = await client.post(fakes.address + "/fault", {"kind": "hagn"}, status=400)
        assert "hagn" in error["error"]["message"]
        await fakes.clear_faults()
        await client.generate(fakes.addresses[1], max_new_tokens=1)


def test_a_probability_is_drawn_from_its_seed() -> None:
    def met(seed: int) -> list[bool]:
        book = FaultBook([ServerFault(kind=FaultKind.HANG, probability=0.3, seed=seed)])
        return [book.take("/generate") is not None for _ in range(200)]

    assert met(1) == met(1) != met(2)
    assert 30 <= sum(met(1)) <= 90


def test_requests_meet_the_oldest_fault_that_concerns_them() -> None:
    book = FaultBook(
        [
            ServerFault(kind=FaultKind.SLOW_ABORT),
            ServerFault(kind=FaultKind.HANG, skip=1, times=1),
            ServerFault(kind=FaultKind.RESET, path="*"),
        ]
    )
    kinds = [
        fault and fault.kind for fault in map(book.take, ["/generate", "/generate", "/generate", "/abort_request"])
    ]
    assert kinds == ["reset", "hang", "reset", "slow_abort"]
    assert book.take("/health") == ServerFault(kind=FaultKind.RESET, path="*")


@pytest.mark.parametrize(
    "fields", [{"times": 0}, {"skip": -1}, {"probability": 1.5}, {"seconds": -1.0}, {"status": 200}, {"fraction": 1.0}]
)
def test_wrong_values_are_refused(fields: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ServerFault(kind=FaultKind.STATUS, **fields)
