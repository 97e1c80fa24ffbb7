"""Requests that a real SGLang server was sent, with its replies, sent to ours. Same weights but for their rounding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

DATA = Path(__file__).parent / "data"
CAPTURED: dict[str, Any] = json.loads((DATA / "sglang_wire.json").read_text())
CALLS = [name for name, captured in CAPTURED.items() if "request" in captured]
CAPTURED["newer_greedy"] = json.loads((DATA / "sglang_wire_0523.json").read_text())["generate_greedy"]
MEASURED = {"id", "weight_version", "cached_tokens", "cached_tokens_details", "e2e_latency"}
LOGPROBS = {"input_token_logprobs", "output_token_logprobs"}

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(serving: Any, smollm2: Path) -> AsyncIterator[Any]:
    """A client of one server for all of these tests."""
    async with serving(checkpoint=smollm2) as client:
        yield client


def shape(value: Any) -> Any:
    """The structure of a JSON value: keys and kinds, with numbers alike and lists as what their entries are."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [json.loads(each) for each in sorted({json.dumps(shape(entry)) for entry in value})]
    return "number" if type(value) in (int, float) else type(value).__name__


@pytest.mark.parametrize("name", [*CALLS, "newer_greedy"])
async def test_replies_have_the_structure_and_the_determined_values(client: Any, name: str) -> None:
    request, captured = CAPTURED[name]["request"], CAPTURED[name]["reply"]
    reply = await client.post("/generate", request)
    ours, theirs = reply["meta_info"], captured["meta_info"]
    num_tokens = len(reply["output_ids"])
    assert ours["weight_versions"] == [{"version": "default", "start": 0, "end": num_tokens}]
    if "weight_versions" not in theirs:  # of an older server
        del ours["weight_versions"]
    details = {"cached_tokens_details"}
    assert shape({key: value for key, value in ours.items() if key not in details}) == shape(
        {key: value for key, value in theirs.items() if key not in details}
    )
    assert reply.keys() == captured.keys()
    assert ours["prompt_tokens"] == theirs["prompt_tokens"]
    assert ours["finish_reason"]["type"] == theirs["finish_reason"]["type"]
    if name == "generate_stop_token":  # rounded weights say it in other words
        assert ours["finish_reason"] == theirs["finish_reason"]
        assert reply["output_ids"][-1] == ours["finish_reason"]["matched"]
        assert len(reply["output_ids"]) == ours["completion_tokens"] == ours["output_token_logprobs_length"]
        return
    assert {key: reply[key] for key in ("text", "output_ids")} == {key: captured[key] for key in ("text", "output_ids")}
    left_out = MEASURED | LOGPROBS | {"response_sent_to_client_ts"}
    assert {key: ours[key] for key in ours.keys() - left_out} == {key: theirs[key] for key in theirs.keys() - left_out}
    for arrays in LOGPROBS & theirs.keys():
        assert [entry[1:] for entry in ours[arrays]] == [entry[1:] for entry in theirs[arrays]]
        for own, other in zip(ours[arrays], theirs[arrays], strict=True):
            assert own[0] == pytest.approx(other[0], abs=0.4)


async def test_cached_prefixes_are_told_as_captured(client: Any) -> None:
    captured = CAPTURED["generate_greedy"]
    await client.post("/generate", captured["request"])
    reply = await client.post("/generate", captured["request"])
    details = captured["reply"]["meta_info"]["cached_tokens_details"]
    assert reply["meta_info"]["cached_tokens_details"] == details


async def test_an_aborted_reply_has_the_captured_structure(client: Any, device: Any) -> None:
    device.slow_down()
    captured = CAPTURED["aborted_meta_without_arrays"]
    body = {
        "input_ids": [3575, 282, 4649, 314],  # nothing of it is cached
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        "return_logprob": True,
        "rid": "r",
    }
    asked = asyncio.ensure_future(client.post("/generate", body))
    await client.until(lambda load: load["num_used_tokens"] > 7)
    await client.post("/abort_request", {"rid": "r"})
    meta = (await asked)["meta_info"]
    assert meta.pop("weight_versions") == [{"version": "default", "start": 0, "end": meta["completion_tokens"]}]
    assert meta["finish_reason"] == captured["finish_reason"]
    assert shape({key: value for key, value in meta.items() if key not in LOGPROBS}) == shape(captured)


async def test_errors_loads_and_model_info_have_the_captured_structure(client: Any) -> None:
    error = await client.post("/generate", {"input_ids": [5] * 9000}, status=400)
    loads = await client.get("/v1/loads?include=core")
    model = await client.get("/model_info")
    expected = CAPTURED["error_400"]["error"]["message"].replace("8192", "256")
    assert error == {"error": {"message": expected}}
    assert shape(loads) == shape(CAPTURED["loads"])
    assert shape(model) == shape(CAPTURED["model_info"])
    assert model["architectures"] == CAPTURED["model_info"]["architectures"]
