"""What a server says of given texts, on both of vLLM's routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollfeed.errors import EngineProtocolError

TEXTS = [np.array([112, 113, 114, 97], np.int32), np.array([98, 99], np.int32)]
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.mark.parametrize("route", [TOKENS, COMPLETIONS])
async def test_texts_are_scored_without_temperature_and_without_the_cache(
    route: str, vllm: Any, engine_at: Any, rescored: Any
) -> None:
    async with vllm(routes={route}) as server, engine_at(server) as engine:
        scored = await engine.score(TEXTS)
        expected = [rescored(text[:1].tolist(), text[1:].tolist()) for text in TEXTS]
        np.testing.assert_allclose(scored[server.address], np.concatenate(expected), atol=1e-9)
        salts = {body["cache_salt"] for body in server.bodies}
        assert len(salts) == len(TEXTS)


async def test_a_server_that_does_not_score_prompts_says_nothing(vllm: Any, engine_at: Any) -> None:
    async with vllm(scores_prompts=False) as server, engine_at(server) as engine:
        assert await engine.score(TEXTS) == {}


async def test_nothing_is_asked_of_a_paused_server(vllm: Any, engine_at: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        await engine.pause()
        assert await engine.score(TEXTS) == {}
        await engine.resume()
        assert await engine.score(TEXTS) != {}


async def test_scores_of_other_tokens_are_refused(vllm: Any, engine_at: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        server._scores = lambda prompt: [None] * len(prompt)
        with pytest.raises(EngineProtocolError, match="it scored other tokens than it was sent"):
            await engine.score(TEXTS)
