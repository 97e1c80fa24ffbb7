"""Aborting, pausing, weights and what the server tells of itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

PROMPT = [72, 101, 108, 108, 111]
LONG = {"max_new_tokens": 900, "ignore_eos": True}


def long(client: Any, rid: str, **sampling: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(client.generate(PROMPT, top={"rid": rid}, **{**LONG, **sampling}))


async def until_decoding(client: Any, num_running: int) -> None:
    await client.until(
        lambda load: (
            load["num_running_reqs"] == num_running and load["num_used_tokens"] > num_running * (len(PROMPT) + 1)
        )
    )


async def test_a_bucket_of_a_session_that_has_ended_is_none_of_the_next_one(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def slowly(_text: str) -> dict[str, Any]:
        arrived.set()
        assert go_on.wait(60.0)
        return {"model.norm.weight": np.zeros(32, np.float32)}

    monkeypatch.setattr("rollfeed.base.tensor_buckets.read_bucket", slowly)
    bucket = {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket", "weight_version": "7"}
    async with serving() as client:
        await client.post("/begin_weight_update", {})
        late = asyncio.ensure_future(client.post("/update_weights_from_tensor", bucket, status=400))
        await asyncio.to_thread(arrived.wait, 60.0)
        await client.post("/end_weight_update", {})
        await client.post("/begin_weight_update", {})
        go_on.set()
        assert "must run between" in str(await late)
        told = await client.post("/end_weight_update", {})
        assert told["message"] == "Success: tensors without the name of a version are not kept"


async def test_an_abort_answers_with_what_has_been_sampled(serving: Any, device: Any) -> None:
    device.slow_down()
    async with serving(context_length=1024) as client:
        first, second = long(client, "first"), long(client, "second")
        await until_decoding(client, 2)
        assert await client.post("/abort_request", {"rid": "unknown"}) == ""
        assert await client.post("/abort_request", {"rid": "first"}) == ""
        reply = await first
        assert not second.done()
        assert await client.post("/abort_request", {"abort_all": True}) == ""
        await second
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(reply["output_ids"]) == len(meta["output_token_logprobs"]) < 900


async def test_aborting_a_request_of_several_samples_aborts_them_all(serving: Any, device: Any) -> None:
    device.slow_down()
    async with serving(context_length=1024) as client:
        asked = long(client, "group", n=6)
        await client.until(lambda load: load["num_waiting_reqs"] == 2)
        await client.post("/abort_request", {"rid": "group"})
        replies = await asked
    assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"abort"}
    assert replies[5]["output_ids"] == []
    assert "output_token_logprobs" not in replies[5]["meta_info"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_requests_go_on_after_a_pause_as_if_there_had_been_none(serving: Any, device: Any, mode: str) -> None:
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0.0}
    async with serving(context_length=1024) as client:
        expected = await client.generate(PROMPT, **sampling)
        device.slow_down()
        asked = [asyncio.ensure_future(client.generate(PROMPT, **sampling)) for _ in range(2)]
        await until_decoding(client, 2)
        paused = await client.post("/pause_generation", {"mode": mode})
        assert paused["status"] == "ok"
        before = client.service.generated_tokens
        await client.get("/server_info")
        async with client.session.get(client.address + "/health_generate") as response:
            assert response.status == 200
        assert client.service.generated_tokens == before
        device.speed_up()
        await client.post("/continue_generation", {})
        replies = await asyncio.gather(*asked)
    for reply in replies:
        assert reply["output_ids"] == expected["output_ids"]
        assert reply["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_a_pause_may_abort_and_new_requests_wait(serving: Any, device: Any) -> None:
    device.slow_down()
    async with serving(context_length=1024) as client:
        asked = long(client, "r")
        await until_decoding(client, 1)
        await client.post("/pause_generation", {"mode": "abort"})
        assert (await asked)["meta_info"]["finish_reason"]["type"] == "abort"
        later = asyncio.ensure_future(client.generate(PROMPT, max_new_tokens=2, ignore_eos=True))
        await client.until(lambda load: load["num_waiting_reqs"] == 1)
        await client.post("/continue_generation", {})
        assert len((await later)["output_ids"]) == 2
        await client.post("/pause_generation", {"mode": "never"}, status=400)


async def test_weights_are_replaced_and_their_version_told(serving: Any, other_weights: Path) -> None:
    async with serving() as client:
        before = await client.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
        update = {"model_path": str(other_weights), "weight_version": "v7"}
        reply = await client.post("/update_weights_from_disk", update)
        assert reply["success"] is True
        assert reply["num_paused_requests"] == 0
        after = await client.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
        model = await client.get("/model_info")
        weight = load_file(other_weights / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
        rows = await client.post(
            "/get_weights_by_name", {"name": "model.layers.0.self_attn.k_proj.weight", "truncate_size": 3}
        )
    assert before["output_ids"] != after["output_ids"]
    assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("default", "v7")
    assert (model["weight_version"], model["model_path"]) == ("v7", str(other_weights))
    assert rows == weight[:3].tolist()


@pytest.mark.parametrize("paused", [None, "in_place", "retract"])
async def test_requests_survive_an_update_and_name_the_version_of_each_token(
    serving: Any, device: Any, other_weights: Path, paused: str | None
) -> None:
    device.slow_down()
    async with serving(context_length=1024) as client:
        asked = long(client, "r")
        await until_decoding(client, 1)
        if paused is not None:
            await client.post("/pause_generation", {"mode": paused})
        await client.post("/update_weights_from_disk", {"model_path": str(other_weights), "weight_version": "2"})
        await client.post("/continue_generation", {})
        device.speed_up()
        reply = await asked
    spans = reply["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "2"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 900)
    assert reply["meta_info"]["weight_version"] == "2"


async def test_an_update_may_abort_what_runs(serving: Any, device: Any, other_weights: Path) -> None:
    device.slow_down()
    async with serving(context_length=1024) as client:
        asked = long(client, "r")
        await until_decoding(client, 1)
        update = {"model_path": str(other_weights), "weight_version": "v1", "abort_all_requests": True}
        await client.post("/update_weights_from_disk", update)
        meta = (await asked)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": meta["completion_tokens"]}]


@pytest.mark.parametrize("fault", ["missing", "shape", "name", "truncated", "not finite"])
async def test_weights_that_do_not_fit_change_nothing(
    serving: Any, device: Any, tiny_checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    tensors = {name: values + 1.0 for name, values in load_file(tiny_checkpoint / "model.safetensors").items()}
    if fault == "shape":
        tensors["model.norm.weight"] = np.ones(7, np.float32)
    elif fault == "name":
        tensors["norm.weight"] = tensors.pop("model.norm.weight")
    elif fault == "not finite":
        tensors["model.norm.weight"] = np.full(32, np.nan, np.float32)
    if fault != "missing":
        save_file(tensors, tmp_path / "model.safetensors")
    if fault == "truncated":
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    async with serving(context_length=1024) as client:
        expected = await client.generate(PROMPT, max_new_tokens=8, temperature=0.0)
        device.slow_down()
        asked = long(client, "r")
        await until_decoding(client, 1)
        update = {"model_path": str(tmp_path), "weight_version": "v9", "abort_all_requests": True}
        reply = await client.post("/update_weights_from_disk", update, status=400)
        assert reply["success"] is False
        assert "\n" not in reply["message"]
        device.speed_up()
        assert (await asked)["meta_info"]["finish_reason"]["type"] == "length"
        after = await client.generate(PROMPT, max_new_tokens=8, temperature=0.0)
    assert after["output_ids"] == expected["output_ids"]
    assert after["meta_info"]["weight_version"] == "default"


async def test_the_version_can_be_renamed(serving: Any) -> None:
    async with serving() as client:
        reply = await client.post("/update_weight_version", {"new_version": "step-3"})
        assert reply["success"] is True
        assert (await client.get("/get_model_info"))["weight_version"] == "step-3"
        await client.post("/update_weight_version", {}, status=400)


async def test_a_flushed_cache_is_not_shared(serving: Any) -> None:
    async with serving() as client:
        await client.generate(PROMPT, max_new_tokens=1)
        cached = await client.generate(PROMPT, max_new_tokens=1)
        async with client.session.post(client.address + "/flush_cache") as response:
            assert response.content_type == "text/plain"
        fresh = await client.generate(PROMPT, max_new_tokens=1)
    assert cached["meta_info"]["cached_tokens_details"] == {"device": 4, "host": 0}
    assert (cached["meta_info"]["cached_tokens"], fresh["meta_info"]["cached_tokens"]) == (4, 0)
    assert fresh["meta_info"]["cached_tokens_details"] is None


async def test_the_server_tells_its_limits_and_its_load(serving: Any, device: Any) -> None:
    device.slow_down()
    async with serving(context_length=1024) as client:
        asked = long(client, "r", n=6)
        await client.until(lambda load: load["num_running_reqs"] == 4)
        load = (await client.get("/v1/loads?include=core"))["loads"][0]
        old = await client.get("/get_load")
        await client.post("/abort_request", {"abort_all": True})
        await asked
        server = await client.get("/server_info")
        models = await client.get("/v1/models")
        async with client.session.get(client.address + "/metrics") as response:
            metrics = (await response.text()).splitlines()
    assert (load["num_waiting_reqs"], load["max_running_requests"], load["max_total_num_tokens"]) == (2, 4, 4096)
    assert old[0]["num_reqs"] == 6
    assert (server["context_length"], server["max_queued_requests"]) == (1024, 64)
    assert models["data"][0]["max_model_len"] == 1024
    assert 'rollfeed_engine_requests_total{finish_reason="abort"} 6.0' in metrics
    assert "rollfeed_engine_running_requests 0.0" in metrics


async def test_health_is_an_empty_200_and_health_generate_makes_a_token(serving: Any) -> None:
    async with serving() as client:
        for path in ("/health", "/health_generate"):
            async with client.session.get(client.address + path) as response:
                assert response.status == 200
                assert await response.read() == b""
        assert client.service.generated_tokens == 1


@pytest.mark.parametrize("path", ["/workers", "/list_workers", "/nothing"])
async def test_a_server_is_no_router(serving: Any, path: str) -> None:
    async with serving() as client, client.session.get(client.address + path) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": 7}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": 7}),
        ("/get_weights_by_name", {"name": "nothing"}),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": "x"}),
        ("/pause_generation", {"mode": 7}),
    ],
)
async def test_bad_control_requests_are_refused(serving: Any, path: str, body: Any) -> None:
    async with serving() as client:
        error = await client.post(path, body, status=400)
    assert "message" in error["error"]
