"""Numbers at the edges of what machines hold, and bodies that would grow: refused by every endpoint before they do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfeed.base.loop_thread import LoopThread

EDGES = [sign * 2**power + offset for power in (31, 32, 53, 63, 64, 70) for sign in (1, -1) for offset in (-1, 0, 1)]
FLOATS = [1e-320, 5e-324, -0.0, 0.5, 1e38, 3.5e38, 1e300, 1.7e308, -1e300, -1e-300]
ODD: list[Any] = [*EDGES, *FLOATS, True, False, -1, None, "1", [], {}, [2**63], {"a": 2**64}]
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "0." + "0" * 400 + "1", "1e-999", "01", "+1"]
"""What is JSON by some readings only, or holds more digits than any number has."""

SAMPLING = ["max_new_tokens", "n", "temperature", "top_p", "top_k", "min_new_tokens", "repetition_penalty", "min_p"]
SAMPLING += [
    "stop",
    "stop_token_ids",
    "sampling_seed",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "ignore_eos",
]
OPENAI = ["max_tokens", "max_completion_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "min_tokens"]
OPENAI += ["seed", "stop_token_ids", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty", "logit_bias"]
CHATS = [*OPENAI, "max_output_tokens", "thinking", "reasoning", "parallel_tool_calls"]
FIELDS: dict[str, list[str]] = {
    "/generate": [
        *(f"sampling_params.{name}" for name in SAMPLING),
        *("input_ids", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "stream"),
        *("return_sampling_mask", "priority", "rid"),
    ],
    "/v1/completions": [*OPENAI, "prompt", "suffix"],
    "/v1/chat/completions": CHATS,
    "/v1/responses": CHATS,
    "/v1/messages": CHATS,
    "/v1/messages/count_tokens": CHATS,
    "/abort_request": ["rid", "abort_all"],
    "/get_weights_by_name": ["truncate_size", "name"],
    "/update_weight_version": ["new_version", "abort_all_requests"],
    "/update_weights_from_disk": ["model_path", "weight_version", "flush_cache"],
    "/update_weights_from_tensor": ["serialized_named_tensors", "load_format", "weight_version"],
    "/update_weights_from_distributed": ["names", "dtypes", "shapes", "group_name", "weight_version"],
    "/init_weights_update_group": ["master_port", "rank_offset", "world_size", "group_name", "master_address"],
    "/destroy_weights_update_group": ["group_name"],
}
MESSAGES = [{"role": "user", "content": "x"}]
USUAL: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 2},
    **{path: {"messages": MESSAGES, "input": MESSAGES, "max_tokens": 2} for path in FIELDS if path.startswith("/v1/c")},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/update_weights_from_distributed": {"load_format": "flattened_bucket", "group_name": "none"},
    "/init_weights_update_group": {"backend": "gloo", "group_name": "g", "master_address": "127.0.0.1"},
}
USUAL["/v1/completions"] = {"prompt": [5, 6], "max_tokens": 2}


class Asked:
    """A server in a thread, which is asked and stays alive."""

    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, body, headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def still_serves(self) -> None:
        status, text = self.post("/generate", json.dumps(USUAL["/generate"]).encode())
        assert (status, len(json.loads(text)["output_ids"])) == (200, 2)


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator[Asked]:
    stack = AsyncExitStack()

    async def start() -> str:
        client = await stack.enter_async_context(serving(context_length=64, num_slots=2, max_waiting=6))
        return str(client.address)

    thread = LoopThread("server")
    try:
        yield Asked(thread.call(start()))
    finally:
        thread.call(stack.aclose())
        thread.close()


def with_field(path: str, field: str, value: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(USUAL.get(path, {})))
    first, _, second = field.partition(".")
    if second:
        body[first][second] = value
    else:
        body[first] = value
    return body


@pytest.mark.parametrize("path", FIELDS)
def test_x01_numbers_at_their_edges_are_answered_or_refused(server: Asked, path: str) -> None:
    values = st.one_of(st.sampled_from(ODD), st.integers(-(2**66), 2**66), st.floats(allow_nan=False, width=64))

    @settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(FIELDS[path]), values, st.booleans())
    def check(field: str, value: Any, in_list: bool) -> None:
        given_value = [value] if in_list else value
        if isinstance(given_value, float) and given_value in (float("inf"), float("-inf")):
            given_value = "inf"
        try:
            body = json.dumps(with_field(path, field, given_value), allow_nan=False).encode()
        except ValueError:  # an infinity in a list
            return
        status, text = server.post(path, body)
        assert status in (200, 400, 404), (body, text)
        assert "Traceback" not in text

    check()
    server.still_serves()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/get_weights_by_name"])
@pytest.mark.parametrize("raw", RAW)
def test_x01_numbers_that_are_none_are_refused(server: Asked, path: str, raw: str) -> None:
    for field in FIELDS[path]:
        body = json.dumps(with_field(path, field, "HERE")).replace('"HERE"', raw).encode()
        status, text = server.post(path, body)
        assert status in (200, 400), (body, text)
    server.still_serves()


@pytest.mark.parametrize("field", ["master_port", "rank_offset", "world_size"])
def test_x01_a_group_is_joined_by_numbers_that_can_be_only(server: Asked, field: str) -> None:
    usual = {**USUAL["/init_weights_update_group"], "master_port": 1, "rank_offset": 1, "world_size": 2}
    for value in [*EDGES, 65536 if field == "master_port" else 2**16 + 1, -1, -(2**31)]:
        status, text = server.post("/init_weights_update_group", json.dumps({**usual, field: value}).encode())
        assert status == 400, (value, text)
        assert f"{field} must be" in text
    server.still_serves()


def huge(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [5], **fields}


TOO_MUCH: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts by n": ("/generate", {"input_ids": [[5]] * 8, "sampling_params": {"n": 4096}}, "responses in one request"),
    "prompts": ("/generate", {"input_ids": [[5]] * 2000}, "2000 responses in one request: at most 8"),
    "texts": ("/generate", {"text": ["x"] * 2000}, "2000 responses in one request: at most 8"),
    "n": ("/generate", huge(sampling_params={"n": 9}), "9 responses in one request: at most 8"),
    "text": ("/generate", {"text": "x" * 4_000_000}, "is longer than the model's context length"),
    "rid": ("/generate", huge(rid="x" * 400_000, sampling_params={"n": 5}), "rid is longer than 512 characters"),
    "rids": ("/generate", {"input_ids": [[5], [6]], "rid": ["a", "x" * 513]}, "rid is longer than 512 characters"),
    "stops": ("/generate", huge(sampling_params={"stop": ["x"] * 300_000}), "length <= 256"),
    "a long stop": ("/generate", huge(sampling_params={"stop": "x" * 1025}), "length <= 1024"),
    "stop ids": ("/generate", huge(sampling_params={"stop_token_ids": [7] * 4097}), "length <= 4096"),
    "prompts of texts": ("/v1/completions", {"prompt": ["x"] * 9}, "9 responses in one request"),
    "prompts by n of texts": ("/v1/completions", {"prompt": ["x"] * 3, "n": 4}, "responses in one request"),
    "a long prompt": ("/v1/completions", {"prompt": "x" * 5000}, "is longer than the model's context length"),
    "an id": ("/v1/completions", {"prompt": "x", "rid": "x" * 513}, "rid is longer than 512 characters"),
    "choices": ("/v1/chat/completions", {"messages": MESSAGES, "n": 9, "max_tokens": 1}, "at most 8 fit"),
    "a long message": ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 1}, "64"),
    "deep": ("/v1/responses", {"input": json.loads("[" * 150 + "]" * 150)}, "100 lists and objects deep"),
    "many": ("/generate", {"x": [[]] * 300_000}, "262144 lists and objects"),
}


@pytest.mark.parametrize(("path", "body", "told"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_x03_what_would_grow_is_refused_before_it_does(server: Asked, path: str, body: Any, told: str) -> None:
    status, text = server.post(path, json.dumps(body).encode())
    assert (status, told in text) == (400, True), text
    server.still_serves()


def test_x03_a_body_larger_than_all_that_fits_is_not_read(server: Asked) -> None:
    status, text = server.post("/generate", b" " * (8 << 20))
    assert status == 413
    assert "too large" in text
    server.still_serves()
