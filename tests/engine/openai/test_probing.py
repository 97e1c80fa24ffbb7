"""A server that cannot be trained on is refused in one line; evaluation makes do with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import FinishKind

PROMPT = np.array([112, 113, 114], np.int32)
COMPLETIONS = "/v1/completions"


async def refusal(engine: Any) -> str:
    with pytest.raises(EngineError) as caught:
        async with engine:
            pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("stream", [True, False])
async def test_without_token_ids_training_is_refused(vllm: Any, engine_at: Any, stream: bool) -> None:
    async with vllm(routes={COMPLETIONS}, ids="none") as server:
        assert await refusal(engine_at(server, stream=stream)) == (
            f"{server.address}: /v1/completions returns no token ids, so that nothing can be trained on it: serve with "
            "vLLM 0.10.2 or later (an SGLang server goes under engine.sglang), or set "
            'engine.openai.purpose = "evaluation"'
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_without_logprobs_training_is_refused(vllm: Any, engine_at: Any, stream: bool) -> None:
    async with vllm(has_logprobs=False) as server:
        message = await refusal(engine_at(server, stream=stream))
        assert "returns no logprobs, so that nothing can be trained on it" in message
        assert "--max-logprobs" in message


async def test_a_server_that_refuses_unknown_fields_can_be_evaluated_only(
    vllm: Any, engine_at: Any, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with vllm(routes={COMPLETIONS}, ids="none", strict=True) as server:
        assert "returns no token ids" in await refusal(engine_at(server))
        with caplog.at_level(logging.WARNING, logger="rollfeed"):
            async with engine_at(server, exact=False) as engine:
                completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert "good for evaluation only" in caplog.text
        assert completion.text == "".join(map(chr, completion.token_ids))
        assert len(completion.text) == 6
        assert completion.finish_reason.kind is FinishKind.LENGTH
        assert np.isnan(completion.logprobs).all()
        assert set(server.requests[-1][1]) == {
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "seed",
            "stream",
        }


@pytest.mark.parametrize("stream", [True, False])
async def test_for_evaluation_ids_are_exact_where_only_logprobs_are_missing(
    vllm: Any, engine_at: Any, asked: Any, stream: bool
) -> None:
    async with vllm(has_logprobs=False) as server, engine_at(server, exact=False, stream=stream) as engine:
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert len(completion.token_ids) == 6
        assert np.isnan(completion.logprobs).all()


async def test_for_evaluation_a_whole_server_is_as_exact_as_for_training(
    vllm: Any, engine_at: Any, asked: Any, rescored: Any
) -> None:
    async with vllm() as server, engine_at(server, exact=False) as engine:
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        expected = rescored(PROMPT.tolist(), completion.token_ids.tolist())
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "params", "hidden"),
    [
        ("raw", {"temperature": 0.7}, "temperature = 0.7"),
        ("raw", {"top_p": 0.9}, "top_p = 0.9"),
        ("raw", {"top_k": 4}, "top_k = 4"),
        ("raw", {"min_new_tokens": 2}, "min_new_tokens = 2"),
        ("raw", {}, None),
        ("raw", {"temperature": 0.0}, None),
        ("temperature", {"temperature": 0.7}, None),
        ("temperature", {"top_k": 4}, "top_k = 4"),
        ("processed", {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "repetition_penalty": 1.1}, None),
    ],
)
async def test_logprobs_of_another_distribution_than_the_one_sampled_from_are_refused(
    vllm: Any, engine_at: Any, asked: Any, mode: str, params: dict[str, Any], hidden: str | None
) -> None:
    async with vllm(logprobs_mode=mode) as server, engine_at(server) as engine:
        if hidden is None:
            await engine.generate(PROMPT, asked(**params), request_id="a")
            return
        with pytest.raises(EngineProtocolError, match="--logprobs-mode processed_logprobs") as caught:
            await engine.generate(PROMPT, asked(**params), request_id="a")
        assert f"do not show {hidden}:" in str(caught.value)


async def test_the_model_is_found_or_checked(vllm: Any, engine_at: Any) -> None:
    cards = [{"id": "a", "max_model_len": 50}, {"id": "b"}]
    async with vllm(models=cards) as server:
        assert "lists 2 models, set engine.openai.model to one of a, b" in await refusal(engine_at(server))
        assert "engine.openai.model = 'c': the server has a, b" in await refusal(engine_at(server, model="c"))
        assert "engine.context_length = 1000: " in await refusal(engine_at(server, model="a"))
        async with engine_at(server, model="b"):
            assert server.requests[-1][1]["model"] == "b"


async def test_what_is_no_such_server_is_refused(serve_handler: Any, engine_at: Any) -> None:
    from aiohttp import web

    async def nothing(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="hello")

    async with serve_handler(nothing) as address:
        assert "not an OpenAI-style server" in await refusal(engine_at(address))


@in_virtual_time
async def test_a_server_that_does_not_come_is_given_up(engine_at: Any) -> None:
    message = await refusal(engine_at("http://127.0.0.1:9", startup_timeout_seconds=0.3))
    assert message.startswith("not there within startup_timeout_seconds = 0.3: http://127.0.0.1:9")


async def test_a_server_that_starts_late_is_waited_for(vllm: Any, engine_at: Any) -> None:
    from aiohttp import web

    async with vllm() as server:
        replies = [503, 503]
        healthy = server.handle

        async def late(request: web.Request) -> web.StreamResponse:
            return web.Response(status=replies.pop()) if replies else await healthy(request)

        server.handle = late
        async with engine_at(server) as engine:
            await engine.health()
        assert replies == []


async def test_a_server_that_is_gone_is_not_healthy(vllm: Any, engine_at: Any) -> None:
    async with vllm() as server:
        engine = await engine_at(server).__aenter__()
    try:
        with pytest.raises(EngineUnavailableError):
            await engine.health()
    finally:
        await engine.__aexit__()


async def test_the_embedded_engines_completions_are_good_for_evaluation_only(
    embedded_server: Callable[[], AbstractAsyncContextManager[str]], engine_at: Any, asked: Any
) -> None:
    async with embedded_server() as address:
        assert f"{address}: /v1/completions returns no token ids, so that nothing can be trained on it" in (
            await refusal(engine_at(address, context_length=256))
        )
        async with engine_at(address, exact=False, context_length=256) as engine:
            completion = await engine.generate(PROMPT, asked(), request_id="a")
            assert np.isnan(completion.logprobs).all()
            assert completion.finish_reason.kind in (FinishKind.LENGTH, FinishKind.STOP)
