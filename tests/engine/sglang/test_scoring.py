"""What every server says of given texts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import SamplingParams

TEXTS = [np.array([33, 34, 35, 36], np.int32), np.array([40, 41], np.int32)]


async def test_texts_are_scored_as_a_response_is_by_the_one_that_sampled_it(
    embedded_server: Any, engine_at: Any
) -> None:
    async with embedded_server() as address, engine_at(address, context_length=200) as engine:
        params = SamplingParams(max_new_tokens=20, seed=1)
        completion = await engine.generate(TEXTS[0], params, request_id="a")
        text = np.concatenate([TEXTS[0], completion.token_ids])
        for _ in range(2):  # the second time the prefix is in the cache
            scored = await engine.score([text, TEXTS[1]])
            assert list(scored) == [address]
            assert len(scored[address]) == len(text) - 1 + 1
            np.testing.assert_allclose(scored[address][3:-1], completion.logprobs, atol=1e-3)


async def test_what_an_abort_of_everything_ends_is_scored_again(scripted: Any, engine_at: Any) -> None:
    aborted: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(aborted) < limit:
            aborted.append(request)
            meta = {"finish_reason": {"type": "abort", "message": "Aborted"}, "weight_version": "default"}
            return web.json_response([{"meta_info": meta}] * len(TEXTS))
        return await scores(-1.0)(request)

    async with scripted() as (server,), engine_at(server) as engine:
        server.generate = answer
        limit = 2
        assert (await engine.score(TEXTS))[server.address].tolist() == [-1.0] * 4
        limit = 100
        with pytest.raises(EngineUnavailableError, match="before they were scored"):
            await engine.score(TEXTS)


async def test_every_server_answers_for_itself(scripted: Any, engine_at: Any) -> None:
    async with scripted(3) as servers, engine_at(*servers) as engine:
        for number, server in enumerate(servers):
            server.generate = scores(-1.0 - number)
        scored = await engine.score(TEXTS)
        assert {address: set(logprobs.tolist()) for address, logprobs in scored.items()} == {
            server.address: {-1.0 - number} for number, server in enumerate(servers)
        }
        assert servers[0].requests[0]["logprob_start_len"] == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda meta: meta.update(weight_version="5"), "scored by version 5, not 0"),
        (lambda meta: meta.pop("input_token_logprobs"), "does not score texts"),
        (lambda meta: meta["input_token_logprobs"].pop(), "scored other tokens than it was sent"),
        (lambda meta: meta["input_token_logprobs"][1].__setitem__(0, None), "has no log-probability"),
    ],
)
async def test_what_is_no_score_of_the_texts_is_refused(
    spoil: Any, message: str, scripted: Any, engine_at: Any
) -> None:
    async with scripted(1) as servers, engine_at(*servers) as engine:
        servers[0].generate = scores(-1.0, spoil)
        with pytest.raises(EngineProtocolError, match=message):
            await engine.score(TEXTS)


async def test_the_last_token_of_the_vocabulary_may_be_told_as_the_first(scripted: Any, engine_at: Any) -> None:
    async with scripted(1) as servers, engine_at(*servers) as engine:
        servers[0].generate = scores(-1.0, lambda meta: meta["input_token_logprobs"][1].__setitem__(1, 0))
        assert set((await engine.score(TEXTS))[servers[0].address]) == {-1.0}


async def test_nothing_is_asked_of_paused_servers(scripted: Any, engine_at: Any) -> None:
    async with scripted(1) as servers, engine_at(*servers) as engine:
        await engine.pause()
        assert await engine.score(TEXTS) == {}


def scores(logprob: float, spoil: Any = lambda meta: None) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        replies = []
        for text in json.loads(await request.read())["input_ids"]:
            logprobs = [[None if not place else logprob, token, None] for place, token in enumerate(text)]
            meta = {"input_token_logprobs": logprobs, "weight_version": "default"}
            spoil(meta)
            replies.append({"text": "", "meta_info": meta})
        return web.json_response(replies)

    return answer
