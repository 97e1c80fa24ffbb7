"""Servers that say what cannot be: nothing of it is trained on, and each time is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import SamplingParams

PROMPT = np.array([3, 4, 5], np.int32)
EngineAt = Callable[..., ServerEngine]
Lie = Callable[[dict[str, Any]], Any]


def telling(reply: Any, lie: Lie, token_ids: list[int], **meta: Any) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        content = reply(token_ids, to=await request.json(), **meta)
        lie(content)
        return web.json_response(content)

    return answer


def logprob(value: float) -> Lie:
    return lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(0, value)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (logprob(0.7), "its logprobs go from -0.5 to 0.7"),
        (logprob(100.0), "its logprobs go from -0.5 to 100"),
        (logprob(-1e30), "its logprobs go from -1e"),
        (lambda r: r["meta_info"]["output_token_logprobs"][1].__setitem__(1, 9), "not the ids beside its logprobs"),
        (lambda r: r["meta_info"].update(output_token_logprobs=[[[-0.5, 7, None]], [[-0.5, 8, None]]]), "Expected"),
        (lambda r: r.update(output_ids=[[7, 8, 9, 9]]), "output_ids are not all integers"),
        (lambda r: r["meta_info"].update(prompt_tokens=1), "answers 1 prompt tokens, 3 were sent"),
        (lambda r: r["meta_info"].update(id="another"), "answers request another, not r."),
        (lambda r: r["meta_info"].update(weight_version="999"), "tokens of version 999, 0 is the newest"),
        (lambda r: r["meta_info"].update(finish_reason={"type": "stop", "matched": "END"}), "stopped at 'END'"),
    ],
)
async def test_a_lie_is_refused_and_counted(
    scripted: Any, engine_at: EngineAt, reply: Any, lie: Lie, said: str
) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        server.generate = telling(reply, lie, [7, 8, 9, 9])
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")
        assert said in str(caught.value)
        assert server.address in str(caught.value) or "stopped at" in str(caught.value)
        assert engine.metrics()["rejected_replies"] == 1
        server.generate = server.answer_whole
        assert len((await engine.generate(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")).token_ids) == 4


@pytest.mark.parametrize(
    ("token_ids", "finish", "said"),
    [
        ([7, 8, 9], {"type": "length", "length": 3}, "ended for its length after 3 of 8 tokens"),
        ([], {"type": "stop", "matched": None}, "stopped before its first token"),
        ([7, 1 << 20], {"type": "stop", "matched": None}, "out of a vocabulary of 1000"),
    ],
)
async def test_an_end_that_cannot_be_is_refused(
    scripted: Any, engine_at: EngineAt, reply: Any, token_ids: list[int], finish: Any, said: str
) -> None:
    async with scripted() as (server,), engine_at(server, vocab_size=1000) as engine:
        server.generate = telling(reply, lambda r: None, token_ids, finish=finish)
        with pytest.raises(EngineProtocolError) as caught:
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=8), request_id="r")
        assert said in str(caught.value)


@pytest.mark.parametrize("text", ["a right answer", None])
async def test_text_is_made_of_the_tokens_whatever_the_server_says(
    scripted: Any, engine_at: EngineAt, reply: Any, text: str | None
) -> None:
    async with scripted() as (server,), engine_at(server) as engine:
        server.generate = telling(reply, lambda r: r.pop("text") if text is None else r.update(text=text), [72, 105])
        completion = await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
    assert completion.text == "Hi"


async def test_a_version_of_somebody_else_is_taken_over_when_all_servers_have_it(
    scripted: Any, engine_at: EngineAt, reply: Any
) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_interval_seconds=60.0) as engine:
        params = SamplingParams(max_new_tokens=2)
        for server in servers:
            server.version = "5"
        through, after = [await engine.generate(PROMPT, params, request_id="r") for _ in range(2)]
        assert engine.policy_version == 5
        assert {span.policy_version for span in through.version_spans} == {0}  # at most: it was sent before
        assert {span.policy_version for span in after.version_spans} == {5}
        servers[0].version = "6"
        prompts = [np.array([number, 7], np.int32) for number in range(20)]
        answers = await asyncio.gather(*(engine.generate(ids, params, request_id="x") for ids in prompts))
        assert {span.policy_version for each in answers for span in each.version_spans} == {5}
        assert engine.metrics()["rejected_replies"] == 0


async def test_an_endless_reply_is_bounded_by_what_was_asked_for(scripted: Any, engine_at: EngineAt) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while sent < 1 << 26:
            await response.write(b" " * (1 << 16))
            sent += 1 << 16
        return response

    async with scripted() as (server,), engine_at(server, max_tries=1) as engine:
        server.generate = endless
        with pytest.raises(EngineUnavailableError, match=r"a body of more than \d+ bytes, which are the most"):
            await engine.generate(PROMPT, SamplingParams(max_new_tokens=2), request_id="r")
    assert sent < 1 << 25
