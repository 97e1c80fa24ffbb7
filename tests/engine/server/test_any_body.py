"""No body, however odd, is answered by anything but a reply or a refusal."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from bench.hardening_server import SAMPLING, body_of
from yarl import URL

CHAT_PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]


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
            body, headers = body_of(Random(seed), path), {"Content-Type": "application/json"}
            async with client.session.post(client.address + path, data=body, headers=headers) as response:
                text = await response.text()
                assert response.status in (200, 400), f"{body!r}: {text}"
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
