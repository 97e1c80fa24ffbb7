"""No body, however odd, is answered by anything but a reply or a refusal."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from yarl import URL

ODD: list[Any] = [None, True, False, 0, 1, -1, 2**40, 10**30, 0.5, -3.5, 1e300, "", "x", "\x00", "é" * 50, [], [1]]
ODD += [["x"], [[]], [None], [[1, 2], [3]], {}, {"x": 1}, [{}], [{"max_new_tokens": 1}], [1, "x"], [True]]

GENERATE = [
    *("input_ids", "text", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid"),
    *("stream", "image_data", "lora_path"),
]
SAMPLING = [
    *("max_new_tokens", "n", "temperature", "top_p", "top_k", "min_new_tokens", "repetition_penalty", "stop"),
    *("stop_token_ids", "skip_special_tokens", "no_stop_trim", "sampling_seed", "ignore_eos", "min_p", "logit_bias"),
]
OPENAI = [
    *("model", "prompt", "messages", "max_tokens", "stream", "stream_options", "logprobs", "echo", "seed", "tools"),
    *("response_format", "n", "stop", "rid", "min_tokens", "temperature"),
]
CHATS = [
    *(
        "model",
        "messages",
        "input",
        "instructions",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "thread",
        "max_tokens",
    ),
    *(
        "max_output_tokens",
        "stop_sequences",
        "stop",
        "stream",
        "stream_options",
        "include",
        "text",
        "reasoning",
        "seed",
    ),
    *("previous_response_id", "parallel_tool_calls", "output_config", "chat_template_kwargs", "logprobs", "rid"),
    *("top_logprobs", "store", "metadata", "response_format", "n", "temperature", "min_tokens", "stop_token_ids"),
]
PARTS = [
    "type",
    "role",
    "content",
    "text",
    "tool_calls",
    "call_id",
    "name",
    "arguments",
    "input",
    "output",
    "tool_use_id",
]
TOOLS = ["type", "name", "function", "parameters", "input_schema", "description", "format", "tools"]
KINDS = ["message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "tool_use", "tool_result"]
KINDS += ["thinking", "text", "input_text", "image", "function", "custom", "namespace"]
CHAT_PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
CONTROL = ["rid", "abort_all", "mode", "new_version", "name", "truncate_size", "abort_all_requests", "flush_cache"]
MESSAGE = ["role", "content", "name", "tool_calls"]


def some(random: Random, names: list[str]) -> dict[str, Any]:
    return {name: random.choice(ODD) for name in random.sample(names, random.randrange(1, 4))}


def body_for(random: Random, path: str) -> dict[str, Any]:
    if path == "/generate":
        sampling = {"max_new_tokens": 2, **some(random, SAMPLING)}
        return {
            "input_ids": [5, 6],
            "sampling_params": sampling,
            **(some(random, GENERATE) if random.random() < 0.5 else {}),
        }
    if path in CHAT_PATHS:
        part = {"type": random.choice(KINDS), **some(random, PARTS)}
        messages: list[Any] = [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}, part]
        usual = {"messages": random.sample(messages, 2), "input": random.sample(messages, 2), "max_tokens": 2}
        tools = [{"type": random.choice(KINDS), **some(random, TOOLS)}]
        return {**usual, **({"tools": tools} if random.random() < 0.5 else {}), **some(random, CHATS)}
    if path.startswith("/v1/"):
        messages = [{"role": "user", "content": "x", **some(random, MESSAGE)}]
        usual = {"messages": messages} if "chat" in path else {"prompt": "x"}
        return {**usual, "max_tokens": 2, **some(random, OPENAI + SAMPLING)}
    return some(random, CONTROL)


@pytest.mark.parametrize(
    "path",
    [
        *("/generate", "/v1/completions", *CHAT_PATHS, "/abort_request", "/update_weight_version"),
        *("/get_weights_by_name", "/update_weights_from_disk"),
    ],
)
async def test_an_odd_body_is_answered_or_refused(serving: Any, path: str) -> None:
    async with serving(context_length=64) as client:
        for seed in range(150):
            body = body_for(Random(seed), path)
            async with client.session.post(client.address + path, json=body) as response:
                text = await response.text()
                assert response.status in (200, 400), f"{body}: {text}"
                assert "Traceback" not in text
        await client.until_idle()
        await client.generate([5], max_new_tokens=1)


NEAR_LIMITS = [sign * 2**power + offset for power in (31, 63, 64) for sign in (1, -1) for offset in (-1, 0, 1)]
INT32, INT64 = range(-(2**31), 2**31), range(-(2**63), 2**64)
FITTING = {
    **dict.fromkeys(["min_new_tokens", "min_tokens", "top_k", "truncate_size"], range(2**31)),
    **dict.fromkeys(["sampling_seed", "seed"], INT64),
    "stop_token_ids": INT32,
    "logprob_start_len": range(-(2**70), 0),
}
"""Values that mean something here; of the fields that are not named, none of the values near limits does."""


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/generate", ["max_new_tokens", "n", "top_k", "min_new_tokens", "stop_token_ids", "sampling_seed"]),
        ("/generate", ["logprob_start_len", "input_ids"]),
        ("/v1/completions", ["max_tokens", "n", "top_k", "min_tokens", "stop_token_ids", "seed", "prompt"]),
        ("/v1/chat/completions", ["max_tokens", "n", "top_k", "min_tokens", "stop_token_ids", "seed"]),
        ("/v1/messages", ["top_k", "min_tokens"]),
        ("/get_weights_by_name", ["truncate_size"]),
    ],
)
async def test_an_integer_near_a_limit_is_answered_or_refused_and_never_ends_the_engine(
    serving: Any, path: str, names: list[str]
) -> None:
    async with serving(context_length=64) as client:
        for name, value in ((name, value) for name in names for value in NEAR_LIMITS):
            given = [value] if name in ("stop_token_ids", "input_ids", "prompt") else value
            sampling = {"max_new_tokens": 2, **({name: given} if path == "/generate" and name in SAMPLING else {})}
            body = {"input_ids": [5], "sampling_params": sampling, "return_logprob": True, "name": "model.norm.weight"}
            if path != "/generate":
                body = {"prompt": [5], "max_tokens": 2, "name": "model.norm.weight"}
                body["messages"] = [{"role": "user", "content": "x"}]
            if name not in sampling or path != "/generate":
                body[name] = given
            async with client.session.post(client.address + path, json=body) as response:
                expected = 200 if value in FITTING.get(name, ()) else 400
                assert response.status == expected, (name, value, await response.text())
        await client.generate([5], max_new_tokens=1)


@pytest.mark.parametrize(
    "probe", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x18\x04", b"\x16\x03\x01\x02\x00\x01\r\n\r\n"]
)
async def test_bytes_that_are_not_http_are_refused_without_a_word_in_the_log(
    serving: Any, probe: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as client:
        address = URL(client.address)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(probe)
        assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
        writer.close()
        await client.generate([5], max_new_tokens=1)
    assert caplog.records == []
