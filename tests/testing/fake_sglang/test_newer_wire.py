"""Replies and ways beside those captured from a real SGLang 0.5.23."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.testing.fake_sglang.conftest import plain_client

from rollfeed.testing.fake_sglang import Fakes, ScriptedReply, serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time

DATA = Path(__file__).parents[2] / "engine" / "server" / "data" / "sglang_wire_0523.json"
CAPTURED: dict[str, Any] = json.loads(DATA.read_text())
EXCHANGES = CAPTURED["exchanges"]
UPDATE = "/update_weights_from_disk"
TIMES = {"id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"}
HELD = ScriptedReply(output_ids=list(range(1, 21)), finish_reason="length", delay_seconds=60, num_tokens_when_aborted=8)


def shape(value: Any) -> Any:
    """The structure of a JSON value: keys and kinds, with numbers alike."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(entry) for entry in value]
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("name", ["generate_greedy", "generate_n2"])
async def test_replies_have_the_captured_keys_and_values(client: Any, name: str) -> None:
    replies = CAPTURED[name]["reply"]
    listed = replies if isinstance(replies, list) else [replies]
    script = [
        ScriptedReply(
            output_ids=each["output_ids"],
            logprobs=[entry[0] for entry in each["meta_info"].get("output_token_logprobs", [])] or None,
            text=each["text"],
            finish_reason="length",
        )
        for each in listed
    ]
    async with serve_fake_sglang(mode="scripted", script=script) as fakes:
        got = await client.post(fakes.address + "/generate", CAPTURED[name]["request"])
    for ours, theirs in zip(got if isinstance(got, list) else [got], listed, strict=True):
        assert (ours["text"], ours["output_ids"]) == (theirs["text"], theirs["output_ids"])
        meta, captured = ours["meta_info"], theirs["meta_info"]
        assert list(meta) == list(captured)
        assert {key: meta[key] for key in meta.keys() - TIMES} == {key: captured[key] for key in meta.keys() - TIMES}


async def test_the_model_and_its_load_have_the_captured_keys(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        model = await client.get(fakes.address + "/model_info")
        loads = await client.get(fakes.address + "/v1/loads?include=core")
        info = await client.get(fakes.address + "/server_info")
    captured = {**CAPTURED["model_info_without_embedding"], "has_audio_understanding": False}
    assert model.keys() | {"reasoning_parser", "tool_call_parser"} == captured.keys()
    assert shape(model) == {key: shape(captured[key]) for key in model}
    assert shape(loads) == shape(CAPTURED["loads"])
    assert info["disable_overlap_schedule"] is False


async def called(client: Any, fakes: Fakes, name: str, **changes: Any) -> Any:
    """Send a captured request; the status and the reply must be the captured ones."""
    exchange = EXCHANGES[name]
    path = exchange["request"].split()[1]
    body = None if exchange["body"] is None else {**exchange["body"], **changes}
    reply = await client.post(fakes.address + path, body, status=exchange["status"])
    assert reply == exchange["reply"]
    return reply


class Held:
    """A request that has eight tokens and makes no more."""

    def __init__(self, client: Any, fakes: Fakes) -> None:
        self.reply = asyncio.ensure_future(client.generate(fakes.address, max_new_tokens=20, top={"rid": "abort-me"}))

    async def meta(self) -> Any:
        return (await self.reply)["meta_info"]


def as_captured(meta: Any, captured: Any) -> bool:
    """Whether the reply names the same versions as the captured one, and as many, and ended in the same way."""
    told, theirs = meta["weight_versions"], captured["weight_versions"]
    assert [each["version"] for each in told] == [each["version"] for each in theirs]
    assert told[0]["start"] == 0
    assert told[-1]["end"] == meta["completion_tokens"]
    assert [each["end"] for each in told[:-1]] == [each["start"] for each in told[1:]]
    assert meta["weight_version"] == captured["weight_version"]
    assert meta["num_retractions"] == captured["num_retractions"]
    return bool(meta["finish_reason"]["type"] == captured["finish_reason"]["type"])


@pytest.mark.parametrize(
    ("mode", "start", "calls"),
    [
        ("in_place", "1", ["in_place_no_flush"]),
        ("in_place", "2", ["in_place_default_flush"]),
        ("in_place", "3", ["in_place_twice", "in_place_twice_1"]),
        ("retract", "5", ["retract_default_flush"]),
        ("retract", "6", ["retract_no_flush"]),
        ("abort", "7", ["abort_default_flush"]),
        (None, "10", ["no_pause_abort_all"]),
    ],
)
@in_virtual_time
async def test_an_update_under_a_running_request_is_answered_as_captured(
    mode: str | None, start: str, calls: list[str]
) -> None:
    async with plain_client() as client, serve_fake_sglang(mode="scripted", script=[HELD], speed=100.0) as fakes:
        await client.post(fakes.address + "/update_weight_version", {"new_version": start})
        held = Held(client, fakes)
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        if mode is not None:
            await client.post(fakes.address + "/pause_generation", {"mode": mode})
        for call in calls:
            name = call.removesuffix("_1")
            await called(client, fakes, name + "_update_weights_from_disk" + call.removeprefix(name))
        model = await client.get(fakes.address + "/model_info")
        await client.post(fakes.address + "/continue_generation", {})
        captured = CAPTURED["spans"][calls[0].removesuffix("_1")]
        assert as_captured(await held.meta(), captured)
        if calls == ["in_place_default_flush"]:
            refused = CAPTURED["after_the_refused_flush"]
            after = await client.generate(fakes.address, max_new_tokens=3)
            assert model["weight_version"] == refused["model_info"]
            assert after["meta_info"]["weight_versions"] == refused["reply"]


@pytest.mark.parametrize("name", ["no_pause_default", "no_pause_no_flush"])
@in_virtual_time
async def test_an_update_without_a_pause_waits_for_what_runs_and_what_comes_waits_for_it(name: str) -> None:
    captured = CAPTURED["spans"][name]
    start = captured["weight_version"]
    script = [ScriptedReply(output_ids=[1, 2], finish_reason="length", delay_seconds=10.0)]
    async with plain_client() as client, serve_fake_sglang(mode="scripted", script=script, speed=100.0) as fakes:
        await client.post(fakes.address + "/update_weight_version", {"new_version": start})
        held = Held(client, fakes)
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        updating = asyncio.ensure_future(called(client, fakes, name + "_update_weights_from_disk"))
        await fakes.wait_until(lambda counts: counts["requests"].get(UPDATE) == 1)
        behind = await client.generate(fakes.address, max_new_tokens=4)
        assert as_captured(await held.meta(), captured)
        await updating
    assert [each["version"] for each in behind["meta_info"]["weight_versions"]] == [str(int(start) + 1)]


@pytest.mark.parametrize("name", ["version_default", "version_keeping"])
@in_virtual_time
async def test_a_version_changed_by_name_alone_makes_a_border(name: str) -> None:
    captured = CAPTURED["spans"][name]
    async with plain_client() as client, serve_fake_sglang(mode="scripted", script=[HELD], speed=100.0) as fakes:
        await client.post(
            fakes.address + "/update_weight_version", {"new_version": captured["weight_versions"][0]["version"]}
        )
        held = Held(client, fakes)
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await called(client, fakes, name + "_update_weight_version")
        meta = await held.meta()
    assert as_captured(meta, captured)
    if name == "version_default":  # the last token of what it aborts counts to the new name
        last = captured["weight_versions"][-1]
        assert (
            last["end"] - last["start"]
            == 1
            == meta["weight_versions"][-1]["end"] - meta["weight_versions"][-1]["start"]
        )


async def test_only_the_last_event_of_a_stream_has_the_versions(client: Any) -> None:
    model = {"median_length": 40.0, "sigma_between": 0.0, "sigma_within": 0.0, "stream_interval": 10}
    async with serve_fake_sglang(mode="time-model", speed=1e5, time_model=model) as fakes:
        events = await client.events(fakes.address, max_new_tokens=500)
    chunks = CAPTURED["stream_chunks"]
    assert chunks["last_but_one"]["weight_versions"] is None
    assert chunks["last"]["weight_versions"]
    assert ["weight_versions" in event["meta_info"] for event in events] == [False] * 3 + [True]
    assert all(event["meta_info"]["weight_version"] == "default" for event in events)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@in_virtual_time
async def test_a_paused_server_answers_as_captured(mode: str) -> None:
    captured = CAPTURED["paused"][mode]
    async with plain_client() as client, serve_fake_sglang(mode="scripted", script=[HELD], speed=100.0) as fakes:
        held = Held(client, fakes)
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await called(client, fakes, "pause_" + mode)
        (load,) = (await client.get(fakes.address + "/v1/loads"))["loads"]
        for key in ("num_running_reqs", "num_waiting_reqs"):
            assert load[key] == captured["load_while_paused"][key]
        status, text = captured["flush_cache_while_paused"]
        assert await client.post(fakes.address + "/flush_cache", status=status) == text
        assert captured["health_while_paused"][0] == 0  # nothing within ten seconds
        health = asyncio.ensure_future(client.get(fakes.address + "/health"))
        late = asyncio.ensure_future(client.generate(fakes.address, max_new_tokens=4))
        await fakes.wait_until(lambda counts: counts["requests"].get("/health") == 1)
        assert held.reply.done() == captured["running_done"]
        assert not health.done()
        assert not late.done()
        await called(client, fakes, "continue_after_in_place")
        meta = await held.meta()
        assert meta["num_retractions"] == captured["request"]["num_retractions"]
        assert meta["finish_reason"]["type"] == captured["request"]["finish_reason"]["type"]
        assert await health == ""
        assert len((await late)["output_ids"]) == 4


@in_virtual_time
async def test_an_abort_of_a_paused_server_is_answered_when_it_goes_on() -> None:
    async with plain_client() as client, serve_fake_sglang(mode="scripted", script=[HELD], speed=100.0) as fakes:
        held = Held(client, fakes)
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await called(client, fakes, "pause_in_place")
        await called(client, fakes, "abort_request_while_paused_in_place")
        assert held.reply.done() == CAPTURED["paused"]["abort_by_id"]
        await called(client, fakes, "continue_after_in_place")
        assert (await held.meta())["finish_reason"]["type"] == "abort"


async def test_what_concerns_no_request_is_answered_as_captured(client: Any) -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD]) as fakes:
        for name in ("continue_generation_not_paused", "abort_request_unknown", "flush_cache_idle", "disk_idle"):
            await called(client, fakes, name)
        await called(client, fakes, "disk_idle_without_version")
        assert (await client.get(fakes.address + "/model_info"))["weight_version"] == "1"
        held = Held(client, fakes)
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await called(client, fakes, "flush_cache_with_running")
        await client.post(fakes.address + "/abort_request", {"abort_all": True})
        await held.reply


TEXT = base64.b64encode(pickle.dumps({})).decode()
BUCKET = {"serialized_named_tensors": [TEXT], "load_format": "flattened_bucket"}


async def test_tensors_come_inside_a_session_and_the_version_with_one_of_them(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        address = fakes.address

        async def ask(path: str, body: Any, *, status: int = 200) -> Any:
            return await client.post(address + path, body, status=status)

        outside = await ask("/update_weights_from_tensor", BUCKET, status=400)
        assert "must run between begin_weight_update()" in outside["message"]
        await ask("/end_weight_update", {}, status=400)
        assert await ask("/begin_weight_update", {}) == {"success": True, "message": "Success"}
        assert "already open" in (await ask("/begin_weight_update", {}, status=400))["message"]
        await ask("/update_weights_from_tensor", BUCKET)
        assert (await fakes.stats())["weight_version"] == "default"
        await ask("/update_weights_from_tensor", {**BUCKET, "weight_version": "5"})
        assert (await fakes.stats())["weight_version"] == "5"
        await ask("/update_weights_from_tensor", {**BUCKET, "serialized_named_tensors": ["!"]}, status=400)
        await ask("/end_weight_update", {})


@pytest.mark.parametrize(
    "change",
    [
        {"serialized_named_tensors": []},
        {"serialized_named_tensors": [base64.b64encode(b"no pickle").decode()]},
        {"load_format": "unknown"},
    ],
)
async def test_a_bucket_that_ends_a_real_server_ends_the_fake(client: Any, change: dict[str, Any]) -> None:
    async with serve_fake_sglang() as fakes:
        await client.post(fakes.address + "/begin_weight_update", {})
        with pytest.raises(aiohttp.ClientError):
            await client.post(fakes.address + "/update_weights_from_tensor", {**BUCKET, **change})


async def test_an_old_release_has_tensors_and_no_sessions(client: Any) -> None:
    async with serve_fake_sglang(release="0.5.15") as fakes:
        await client.post(fakes.address + "/begin_weight_update", {}, status=404)
        await client.post(fakes.address + "/update_weights_from_tensor", {**BUCKET, "weight_version": "2"})
        assert (await fakes.stats())["weight_version"] == "2"
