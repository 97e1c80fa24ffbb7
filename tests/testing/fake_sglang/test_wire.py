"""Replies beside those captured from a real server, and requests that one refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.testing.fake_sglang.conftest import plain_client

from rollfeed.testing.fake_sglang import ScriptedReply, serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time

DATA = Path(__file__).parents[2] / "engine" / "server" / "data" / "sglang_wire.json"
CAPTURED: dict[str, Any] = json.loads(DATA.read_text())
CALLS = [name for name, captured in CAPTURED.items() if "request" in captured]
LOGPROBS = {"input_token_logprobs", "output_token_logprobs"}
HELD = ScriptedReply(output_ids=[7, 8, 9], delay_seconds=3600, num_tokens_when_aborted=2)


def shape(value: Any) -> Any:
    """The structure of a JSON value: keys and kinds, with numbers alike and lists as what their entries are."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [json.loads(each) for each in sorted({json.dumps(shape(entry)) for entry in value})]
    return "number" if type(value) in (int, float) else type(value).__name__


def scripted_as(captured: Any) -> ScriptedReply:
    meta = captured["meta_info"]
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
    return ScriptedReply(
        output_ids=captured["output_ids"],
        logprobs=logprobs or None,
        text=captured["text"],
        finish_reason=meta["finish_reason"],
    )


@pytest.mark.parametrize("name", CALLS)
async def test_replies_have_the_captured_structure_and_values(client: Any, name: str) -> None:
    request, captured = CAPTURED[name]["request"], CAPTURED[name]["reply"]
    async with serve_fake_sglang(mode="scripted", script=[scripted_as(captured)], release="0.5.15") as fakes:
        reply = await client.post(fakes.address + "/generate", request)
    ours, theirs = reply["meta_info"], captured["meta_info"]
    assert reply.keys() == captured.keys()
    assert ours.keys() == theirs.keys()
    caches = {"cached_tokens_details"}  # null without a cached token
    assert shape({key: ours[key] for key in ours.keys() - caches}) == shape(
        {key: theirs[key] for key in theirs.keys() - caches}
    )
    assert (reply["text"], reply["output_ids"]) == (captured["text"], captured["output_ids"])
    for key in ("finish_reason", "completion_tokens", "output_token_logprobs"):
        assert ours.get(key) == theirs.get(key)
    if "input_ids" in request:
        assert ours["prompt_tokens"] == theirs["prompt_tokens"]
        scored = [entry[1:] for entry in ours.get("input_token_logprobs", [])]
        assert scored == [entry[1:] for entry in theirs.get("input_token_logprobs", [])]


async def test_cached_tokens_are_told_as_captured(client: Any) -> None:
    model = {"prefix_cache": True, "median_length": 3.0}
    async with serve_fake_sglang(mode="time-model", speed=1e6, time_model=model) as fakes:
        await client.generate(fakes.address, max_new_tokens=4)
        reply = await client.generate(fakes.address, max_new_tokens=4)
    captured = CAPTURED["generate_greedy"]["reply"]["meta_info"]["cached_tokens_details"]
    assert shape(reply["meta_info"]["cached_tokens_details"]) == shape(captured)
    assert reply["meta_info"]["cached_tokens"] == 2


async def test_an_aborted_reply_has_the_captured_structure(client: Any) -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD], release="0.5.15") as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address, top={"rid": "r"}))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        assert await client.post(fakes.address + "/abort_request", {"rid": "r"}) == ""
        reply = await asked
    captured = CAPTURED["aborted_meta_without_arrays"]
    meta = reply["meta_info"]
    assert meta["finish_reason"] == captured["finish_reason"]
    assert shape({key: value for key, value in meta.items() if key not in LOGPROBS}) == shape(captured)
    assert reply["output_ids"] == [7, 8] == [token for _, token, _ in meta["output_token_logprobs"]]


async def test_an_abort_before_the_first_token_has_no_logprobs(client: Any) -> None:
    held = ScriptedReply(output_ids=[7], delay_seconds=3600)
    async with serve_fake_sglang(mode="scripted", script=[held]) as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await client.post(fakes.address + "/abort_request", {"abort_all": True})
        reply = await asked
    assert reply["output_ids"] == []
    assert "output_token_logprobs" not in reply["meta_info"]


async def test_errors_loads_and_model_info_have_the_captured_structure(client: Any) -> None:
    async with serve_fake_sglang(context_length=8192, release="0.5.15") as fakes:
        error = await client.post(fakes.address + "/generate", {"input_ids": [5] * 9000}, status=400)
        loads = await client.get(fakes.address + "/v1/loads?include=core")
        models = [await client.get(fakes.address + path) for path in ("/model_info", "/get_model_info")]
    assert error == CAPTURED["error_400"]
    assert shape(loads) == shape(CAPTURED["loads"])
    assert [shape(model) for model in models] == [shape(CAPTURED["model_info"])] * 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 100}}, "You requested a total of 101 tokens"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"input_ids": []}, "no tokens"),
        ({}, "Either text or input_ids"),
        ({"input_ids": [1], "text": "a"}, "Either text or input_ids"),
        ({"input_ids": 5}, "input_ids must be a list"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1 entries for 2 prompts"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "many"}}, "the body is not what /generate takes"),
        ([], "the body is not what /generate takes"),
        ({"input_ids": [[], [1]]}, "no tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_one_line(client: Any, body: Any, said: str) -> None:
    async with serve_fake_sglang(context_length=64) as fakes:
        error = await client.post(fakes.address + "/generate", body, status=400)
    assert said in error["error"]["message"]
    assert "\n" not in error["error"]["message"]


@pytest.mark.parametrize("mode", ["zero", "scripted", "time-model"])
async def test_samples_and_batches_come_as_lists_with_ids_of_their_own(client: Any, mode: str) -> None:
    async with serve_fake_sglang(mode=mode, speed=1e6) as fakes:
        samples = await client.generate(fakes.address, n=3, max_new_tokens=4, top={"rid": "r"})
        batch = await client.generate(
            fakes.address, max_new_tokens=4, top={"input_ids": [[1], [2, 3]], "rid": ["a", "b"], "stream": False}
        )
        single = await client.generate(fakes.address, max_new_tokens=4, top={"input_ids": [[1]]})
    assert [reply["meta_info"]["id"] for reply in samples] == ["r_0", "r_1", "r_2"]
    assert [(reply["meta_info"]["id"], reply["meta_info"]["prompt_tokens"]) for reply in batch] == [("a", 1), ("b", 2)]
    assert isinstance(single, list)


async def test_a_stream_holds_everything_so_far_and_ends_as_the_whole_reply_does(client: Any) -> None:
    model = {"median_length": 50.0, "sigma_between": 0.0, "sigma_within": 0.0, "stream_interval": 10}
    async with serve_fake_sglang(mode="time-model", speed=1e5, time_model=model) as fakes:
        events = await client.events(fakes.address, max_new_tokens=500, sampling_seed=5)
        whole = await client.generate(fakes.address, max_new_tokens=500, sampling_seed=5)
        several = await client.events(fakes.address, max_new_tokens=500, n=2)
    assert [len(event["output_ids"]) for event in events] == [10, 20, 30, 40, 50]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 4
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    assert {event["index"] for event in several} == {0, 1}


async def test_weight_versions_are_named_in_later_replies(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        body = {"model_path": "/weights", "weight_version": "v7"}
        updated = await client.post(fakes.address + "/update_weights_from_disk", body)
        reply = await client.generate(fakes.address, max_new_tokens=1)
        renamed = await client.post(fakes.address + "/update_weight_version", {"new_version": "v8"})
        model = await client.get(fakes.address + "/model_info")
        await client.post(fakes.address + "/update_weights_from_disk", {}, status=400)
    assert updated.keys() == {"success", "message", "num_paused_requests"}
    assert updated["success"] is True
    assert reply["meta_info"]["weight_version"] == "v7"
    assert renamed["success"] is True
    assert (model["weight_version"], model["model_path"]) == ("v8", "/weights")


async def test_new_weights_while_requests_run_end_an_old_server_unless_told_otherwise(client: Any) -> None:
    body = {"model_path": "/weights", "weight_version": "v1"}
    async with serve_fake_sglang(mode="scripted", script=[HELD, HELD], release="0.5.15") as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address, top={"rid": "r"}))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await client.post(fakes.address + "/update_weights_from_disk", {**body, "flush_cache": False})
        await client.post(fakes.address + "/update_weights_from_disk", {**body, "abort_all_requests": True})
        assert (await asked)["meta_info"]["finish_reason"]["type"] == "abort"
        lost = asyncio.ensure_future(client.generate(fakes.address))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        with pytest.raises(aiohttp.ClientError):
            await client.post(fakes.address + "/update_weights_from_disk", body)
        with pytest.raises(aiohttp.ClientError):
            await lost
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(fakes.address + "/health")
        await fakes.servers[0].restart()
        assert (await client.get(fakes.address + "/model_info"))["weight_version"] == "default"


@pytest.mark.parametrize(("mode", "finished"), [("abort", "abort"), ("retract", "length"), ("in_place", "length")])
@in_virtual_time
async def test_pausing_holds_what_runs_and_what_comes(mode: str, finished: str) -> None:
    async with (
        serve_fake_sglang(mode="time-model", time_model={"median_length": 1000.0}, release="0.5.15") as fakes,
        plain_client() as client,
    ):
        first = asyncio.ensure_future(client.generate(fakes.address, max_new_tokens=30))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        await client.post(fakes.address + "/pause_generation", {"mode": mode})
        second = asyncio.ensure_future(client.generate(fakes.address, max_new_tokens=2))
        counts = await fakes.wait_until(lambda counts: counts["num_waiting"] >= 1)
        assert counts["num_running"] == (1 if mode == "in_place" else 0)
        assert not second.done()
        await client.post(fakes.address + "/continue_generation")
        replies = await asyncio.gather(first, second)
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == [finished, "length"]
    assert replies[0]["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_other_routes_answer_as_a_real_server_does(client: Any) -> None:
    async with serve_fake_sglang(metrics=True) as fakes, serve_fake_sglang() as plain:
        assert await client.get(fakes.address + "/health") == ""
        assert await client.get(fakes.address + "/health_generate") == ""
        assert (await client.post(fakes.address + "/flush_cache")).startswith("Cache flushed.\n")
        assert await client.post(fakes.address + "/release_memory_occupation") is None
        assert "sglang:num_running_reqs 0.0" in await client.get(fakes.address + "/metrics")
        assert (await client.get(fakes.address + "/get_load"))[0]["num_reqs"] == 0
        assert (await client.get(fakes.address + "/v1/models"))["data"][0]["max_model_len"] == 131_072
        assert (await client.get(fakes.address + "/server_info"))["fake"] == {"mode": "zero", "speed": 1.0}
        for path in ("/metrics", "/workers", "/list_workers"):
            assert await client.get(plain.address + path, status=404) == {"detail": "Not Found"}


async def test_a_client_that_leaves_aborts_what_it_asked_for(client: Any) -> None:
    async with serve_fake_sglang(mode="scripted", script=[HELD]) as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        asked.cancel()
        counts = await fakes.wait_until(lambda counts: counts["num_running"] == 0)
    assert counts["finished"] == {"abort": 1}


async def test_a_full_queue_answers_429(client: Any) -> None:
    model = {"num_slots": 1}
    async with serve_fake_sglang(mode="time-model", max_waiting=0, time_model=model) as fakes:
        asked = asyncio.ensure_future(client.generate(fakes.address, max_new_tokens=1000))
        await fakes.wait_until(lambda counts: counts["num_running"] == 1)
        # Nobody waits now, and one would have to.
        await client.generate(fakes.address, max_new_tokens=1000, status=429)
        await client.post(fakes.address + "/abort_request", {"abort_all": True})
        await asked
