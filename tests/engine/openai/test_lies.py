"""A vLLM server that lies beside an honest one: every lie is counted, and every answer is the honest one's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.types import Completion

IDS, CONTENT = [97, 98, 99], [{"token": f"token_id:{i}", "logprob": -0.5} for i in (97, 98, 99)]
LIES: dict[str, dict[str, Any]] = {
    "x11 positive": {"logprobs": {"content": [*CONTENT[:2], {"token": "token_id:99", "logprob": 0.7}]}},
    "x11 low": {"logprobs": {"content": [*CONTENT[:2], {"token": "token_id:99", "logprob": -1e30}]}},
    "x11 none": {"logprobs": {"content": [*CONTENT[:2], {"token": "token_id:99"}]}},
    "x11 beside": {"logprobs": {"content": [*CONTENT[:2], {"token": "token_id:9", "logprob": -0.5}]}},
    "x11 fewer": {"logprobs": {"content": CONTENT[:2]}},
    "x11 unknown": {"token_ids": [97, 98, 2**31], "logprobs": {"content": [{"logprob": -0.5}] * 3}},
    "x11 negative": {"token_ids": [97, 98, -1], "logprobs": {"content": [{"logprob": -0.5}] * 3}},
    "x11 nested": {"token_ids": [IDS]},
    "x12 prompt": {"prompt_token_ids": [1, 2]},
    "x12 version": {"weight_versions": [{"version": "999", "start": 0, "end": 3}]},
    "x12 spans": {"weight_versions": [{"version": "0", "start": 0, "end": 2}]},
    "x13 length": {"finish_reason": "length"},
    "x13 empty": {"token_ids": [], "logprobs": {"content": []}},
    "x13 unmatched": {"stop_reason": "END"},
    "x13 unknown": {"finish_reason": "boredom"},
}
BROKEN = {"deep": b'{"rest": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nan": b'{"choices": NaN}', "cut": b'{"choi'}


def whole(choice: dict[str, Any]) -> Callable[[web.Request], Any]:
    """The lie as a reply, streamed where that is asked for."""
    told = {"index": 0, "finish_reason": "stop", "token_ids": IDS, "logprobs": {"content": CONTENT}} | choice
    return raw(json.dumps({"id": "x", "choices": [told]}).encode())


def raw(content: bytes) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.Response(body=content, content_type="application/json")
        body = b"data: " + content + b"\n\ndata: [DONE]\n\n"
        return web.Response(body=body, content_type="text/event-stream")

    return answer


@pytest.mark.parametrize("stream", [True, False])
async def test_x10_to_x14_answers_beside_a_lying_server_are_the_honest_ones(
    vllm: Any, engine_at: Any, asked: Any, stream: bool
) -> None:
    async def answers(engine: Any) -> list[Completion]:
        prompts = [np.array([97 + number % 26, 100, 101], np.int32) for number in range(48)]
        params = [asked(8, seed=number) for number in range(48)]
        made = (engine.generate(*each, request_id="a") for each in zip(prompts, params, strict=True))
        return await asyncio.gather(*made)

    lies = [*map(whole, LIES.values()), *map(raw, BROKEN.values())]
    async with vllm() as honest, vllm(faults=lies) as lying:
        async with engine_at(honest, lying, stream=stream, routing="round_robin") as engine:
            told, counters = await answers(engine), engine.counters
            assert not lying.faults
            assert counters.rejected_replies == len(LIES)
            assert counters.broken_replies == len(BROKEN)
            assert counters.retries >= len(lies)
        async with engine_at(honest, stream=stream) as engine:
            true = await answers(engine)
    for one, other in zip(told, true, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.text == other.text
