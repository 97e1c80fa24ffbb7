"""``/generate`` over a tiny random model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

PROMPT = [72, 101, 108, 108, 111, 40, 50]
END = 2
"""The id of ``<|im_end|>``, which ends a response."""


def sampled(reply: Any) -> list[float]:
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


async def test_a_reply_has_sglang_s_fields(serving: Any) -> None:
    async with serving() as client:
        reply = await client.generate(PROMPT, max_new_tokens=5, ignore_eos=True, top={"rid": "mine"})
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["output_token_logprobs_length"]) == (7, 5, 5)
    assert meta["weight_version"] == "default"
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[each, None] for each in reply["output_ids"]]
    assert meta["input_token_logprobs"] == []


async def test_what_tokens_were_drawn_from_is_returned_as_sglang_does(serving: Any) -> None:
    asked = {"return_sampling_mask": True}
    async with serving() as client:
        reply = await client.generate(PROMPT, max_new_tokens=4, top_k=20, top_p=0.9, ignore_eos=True, top=asked)
        without = await client.generate(PROMPT, max_new_tokens=4, top_k=20)
        refused = await client.post("/generate", {"text": "a", **asked}, status=400)
    meta = reply["meta_info"]
    masks = meta["output_token_sampling_mask"]
    assert meta["output_token_sampling_mask_length"] == len(masks) == 4
    assert all(token_id in mask for token_id, mask in zip(reply["output_ids"], masks, strict=True))
    assert 1 < max(map(len, masks)) <= 20
    assert meta["output_token_sampling_logprobs"] == sampled(reply)
    assert "output_token_sampling_mask" not in without["meta_info"]
    assert "return_sampling_mask requires a finite top_k of at most 4096; got top_k=-1" in str(refused)


async def test_a_batch_and_several_samples_come_as_a_list_in_order(serving: Any) -> None:
    async with serving() as client:
        batch = await client.generate(
            [PROMPT, PROMPT[:3]], max_new_tokens=3, ignore_eos=True, n=2, top={"rid": ["a", "b"]}
        )
        alone = await client.generate([PROMPT], max_new_tokens=1)
    assert [reply["meta_info"]["id"] for reply in batch] == ["a_0", "a_1", "b_0", "b_1"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in batch] == [7, 7, 3, 3]
    assert len(alone) == 1


async def test_a_batch_may_have_parameters_of_each_prompt(serving: Any) -> None:
    body = {
        "text": ["ab", "cde"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "ignore_eos": True}],
        "return_logprob": [False, True],
    }
    async with serving() as client:
        first, second = await client.post("/generate", body)
    assert "output_token_logprobs" not in first["meta_info"]
    assert len(second["meta_info"]["output_token_logprobs"]) == 2
    assert [each["meta_info"]["prompt_tokens"] for each in (first, second)] == [2, 3]


async def test_the_stop_token_is_in_the_ids_and_trimmed_from_the_text(serving: Any) -> None:
    async with serving() as client:
        long = await client.generate(PROMPT, max_new_tokens=20, temperature=0.0, ignore_eos=True)
        stop = long["output_ids"][3]
        asked = {"max_new_tokens": 20, "temperature": 0.0, "stop_token_ids": [stop], "skip_special_tokens": False}
        trimmed = await client.generate(PROMPT, **asked)
        whole = await client.generate(PROMPT, **asked, no_stop_trim=True)
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    ids = trimmed["output_ids"]
    assert ids == whole["output_ids"] == long["output_ids"][: len(ids)]
    assert ids[-1] == stop
    tokenizer = client.service.tokenizer
    assert trimmed["text"] == tokenizer.decode(ids[:-1], skip_special_tokens=False)
    assert whole["text"] == tokenizer.decode(ids, skip_special_tokens=False)


async def test_zero_new_tokens_come_without_arrays_unless_the_prompt_is_scored(serving: Any) -> None:
    async with serving() as client:
        plain = await client.generate(PROMPT, max_new_tokens=0)
        scored = await client.generate(PROMPT, max_new_tokens=0, top={"logprob_start_len": 0})
    assert plain["output_ids"] == []
    assert plain["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert "output_token_logprobs" not in plain["meta_info"]
    assert scored["meta_info"]["output_token_logprobs"] == []
    assert scored["meta_info"]["input_token_logprobs"][0] == [None, PROMPT[0], None]


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 200), (3, 7), (150, 200), (7, 7), (6, 7)])
async def test_prompt_scores_are_those_of_the_model(
    serving: Any, load_reference: Any, tiny_checkpoint: Path, start: int, length: int
) -> None:
    ids = np.random.default_rng(length).integers(3, 250, length).tolist()
    logits = load_reference(tiny_checkpoint)(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[torch.arange(length - 1), torch.tensor(ids[1:], dtype=torch.long)].tolist()[start:]
    async with serving() as client:
        await client.generate(ids, max_new_tokens=1)  # what is cached must not be missing from the scores
        reply = await client.generate(ids, max_new_tokens=0, top={"logprob_start_len": start})
    entries = reply["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids[start:]
    assert [entry[0] for entry in entries[:1]] == [None][: length - start]
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)


async def test_sampled_logprobs_equal_a_scoring_of_the_whole_sequence(serving: Any) -> None:
    async with serving() as client:
        replies = await client.generate(PROMPT, max_new_tokens=30, ignore_eos=True, n=6, top={"logprob_start_len": 0})
        for reply in replies:
            scored = await client.generate(
                PROMPT + reply["output_ids"], max_new_tokens=0, top={"logprob_start_len": len(PROMPT) - 1}
            )
            entries = scored["meta_info"]["input_token_logprobs"][1:]
            assert sampled(reply) == pytest.approx([entry[0] for entry in entries], abs=1e-4)
            assert len(reply["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    assert len({tuple(reply["output_ids"]) for reply in replies}) > 1


async def test_a_sampling_seed_differs_between_the_samples_of_a_request(serving: Any) -> None:
    async with serving() as client:
        asked = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}
        several = await client.generate(PROMPT, n=3, **asked)
        again = await client.generate(PROMPT, **asked)
    assert len({tuple(reply["output_ids"]) for reply in several}) == 3
    assert again["output_ids"] == several[0]["output_ids"]


async def test_a_stream_grows_and_ends_as_the_whole_reply(serving: Any) -> None:
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    async with serving() as client:
        whole = await client.post("/generate", body)
        events = await client.events("/generate", body)
    last = events[-1]
    assert last["output_ids"] == whole["output_ids"]
    assert last["text"] == whole["text"]
    assert last["meta_info"].keys() == whole["meta_info"].keys()
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(set(lengths))
    for event in events[:-1]:
        assert event["meta_info"]["finish_reason"] is None
        assert last["text"].startswith(event["text"])
        assert last["output_ids"][: len(event["output_ids"])] == event["output_ids"]
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])


async def test_a_stream_of_several_samples_says_which_one_each_event_is_of(serving: Any) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "n": 3, "ignore_eos": True}}
    async with serving(num_slots=2) as client:
        events = await client.events("/generate", body)
    ended = [event for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(event["index"] for event in ended) == [0, 1, 2]


async def test_a_stream_never_shows_the_beginning_of_a_stop_string_that_is_trimmed(serving: Any) -> None:
    async with serving() as client:
        long = await client.generate(PROMPT, max_new_tokens=60, temperature=0.0, ignore_eos=True)
        text = long["text"]
        stop = next(text[at : at + 3] for at in range(4, len(text) - 3) if text[at : at + 3].isascii())
        sampling = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True, "stop": [stop]}
        events = await client.events("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert events[-1]["text"] == text[: text.index(stop)]
    assert all(events[-1]["text"].startswith(event["text"]) for event in events)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [5] * 9000}, "The input (9000 tokens) is longer than the model's context length (256 tokens)."),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0, got -1."),
        ({"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 57}}, "maximum context length of 256 tokens"),
        ({}, "Either text or input_ids should be provided"),
        ({"text": "a", "input_ids": [1]}, "Either text or input_ids should be provided"),
        ({"input_ids": []}, "The input has no tokens."),
        ({"input_ids": [[5], []]}, "The input has no tokens."),
        ({"input_ids": [5, "a"]}, "input_ids must be a list of integers"),
        ({"input_ids": [[5], 7]}, "input_ids must be a list of integers"),
        ({"input_ids": [5.5]}, "input_ids must be a list of integers"),
        ({"input_ids": [-1]}, "token ids must be at least 0"),
        ({"input_ids": [2**70]}, "input_ids must be a list of integers"),
        ({"input_ids": [259]}, "outside the model's vocabulary of 259"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        (
            {"input_ids": [5], "sampling_params": {"temperature": "hot"}},
            "Expected `float | null`, got `str` - at `$.temperature`",
        ),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"input_ids": [5], "sampling_params": {"n": 1000}}, "at most 68 fit"),
        ({"input_ids": [5], "sampling_params": {"min_p": 0.5}}, "min_p is not supported"),
        ({"input_ids": [5], "sampling_params": {"max_new_token": 5}}, "'max_new_token' is not a sampling parameter"),
        ({"input_ids": [5], "sampling_params": [{}, {}]}, "sampling_params has 2 entries for 1 prompts"),
        ({"input_ids": [5], "sampling_params": "x"}, "sampling_params must be an object"),
        ({"input_ids": [5], "rid": 7}, "rid must be a string"),
        ({"input_ids": [5], "stream": "yes"}, "stream must be true or false"),
        ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len (2) is higher"),
        ({"input_ids": [5], "image_data": ["x"]}, "image_data is not supported"),
        ([1], "the body must be a JSON object"),
    ],
)
async def test_bad_requests_are_refused_in_one_line(serving: Any, body: Any, message: str) -> None:
    async with serving() as client:
        error = await client.post("/generate", body, status=400)
        await client.until_idle()
    assert message in error["error"]["message"]
    assert "\n" not in error["error"]["message"]


@pytest.mark.parametrize("body", [b"{bad", b"", b"\xff\xfe", b"[" * 100_000, b'{"text": "\\ud800"}', b"null"])
async def test_what_is_not_json_is_refused(serving: Any, body: bytes) -> None:
    async with serving() as client, client.session.post(client.address + "/generate", data=body) as response:
        assert response.status == 400
        assert "message" in (await response.json())["error"]


async def test_requests_beyond_the_waiting_queue_are_told_to_come_back(serving: Any) -> None:
    async with serving(num_slots=1, max_waiting=2) as client:
        await client.post("/pause_generation", {"mode": "in_place"})
        held = [asyncio.ensure_future(client.generate(PROMPT, max_new_tokens=3)) for _ in range(3)]
        await client.until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 3)
        error = await client.generate(PROMPT, status=429, max_new_tokens=3)
        await client.post("/continue_generation", {})
        assert len(await asyncio.gather(*held)) == 3
        await client.generate(PROMPT, max_new_tokens=3)
    assert error == {"error": {"message": "the waiting queue is full (2 requests); try again later"}}


async def test_requests_start_in_the_order_in_which_they_came(serving: Any) -> None:
    ended: list[int] = []
    async with serving(num_slots=1) as client:

        async def ask(number: int) -> None:
            await client.generate(PROMPT, max_new_tokens=40 if number == 0 else 1, ignore_eos=True)
            ended.append(number)

        asked = []
        await client.post("/pause_generation", {"mode": "in_place"})
        for number in range(8):
            asked.append(asyncio.ensure_future(ask(number)))
            await client.until(lambda load, n=number: load["num_running_reqs"] + load["num_waiting_reqs"] == n + 1)
        await client.post("/continue_generation", {})
        await asyncio.gather(*asked)
    assert ended == list(range(8))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_slots(serving: Any, device: Any, stream: bool) -> None:
    device.slow_down()
    sampling = {"max_new_tokens": 1000, "ignore_eos": True, "n": 4}
    async with serving(context_length=1024) as client:
        async with aiohttp.ClientSession() as leaving:
            body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream}
            asked = asyncio.ensure_future(leaving.post(client.address + "/generate", json=body))
            await client.until(lambda load: load["num_running_reqs"] == 4)
            asked.cancel()
            (response,) = await asyncio.gather(asked, return_exceptions=True)
            if stream and not isinstance(response, BaseException):
                response.close()  # its first part came before it could be cancelled
        await client.until_idle()
        assert client.service.counters.requests_by_reason["abort"] == 4
