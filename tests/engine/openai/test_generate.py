"""What comes back is what was sampled, on every route and in both forms of reply."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from rollfeed.engine.client import ServerEngine
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.testing import END_OF_TURN, check_engine
from rollfeed.types import FinishKind

PROMPT = np.array([112, 113, 114], np.int32)
TOKENS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("routes", [{TOKENS, COMPLETIONS}, {COMPLETIONS}])
async def test_ids_and_logprobs_are_those_of_the_distribution_sampled_from(
    vllm: Any, engine_at: Any, asked: Any, rescored: Any, routes: set[str], stream: bool
) -> None:
    async with vllm(routes=routes) as server, engine_at(server, stream=stream) as engine:
        params = asked(20, temperature=0.7, top_k=5)
        completion = await engine.generate(PROMPT, params, request_id="a")
        assert completion.finish_reason.kind is FinishKind.LENGTH
        assert len(completion.token_ids) == 20
        assert completion.text == "".join(map(chr, completion.token_ids))
        expected = rescored(PROMPT.tolist(), completion.token_ids.tolist(), temperature=0.7, top_k=5)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert [tuple(span) for span in completion.version_spans] == [(0, 20, 0)]
        assert completion.cached_tokens == (2 if stream else 0)
        assert server.requests[-1][0] == (TOKENS if TOKENS in routes else COMPLETIONS)


async def test_ids_are_read_from_tokens_written_as_token_id(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(routes={COMPLETIONS}, ids="tokens") as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert len(completion.token_ids) == len(completion.logprobs) == 6


@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_turn_token_is_kept_and_named(vllm: Any, engine_at: Any, asked: Any, stream: bool) -> None:
    async with vllm(routes={COMPLETIONS}) as server, engine_at(server, stream=stream) as engine:
        server.end_at = 2
        completion = await engine.generate(PROMPT, asked(), request_id="a")
        assert completion.finish_reason == (FinishKind.STOP, END_OF_TURN)
        assert completion.token_ids[-1] == END_OF_TURN
        assert len(completion.token_ids) == 3


async def test_every_parameter_is_sent_since_servers_have_defaults_of_the_model(
    vllm: Any, engine_at: Any, asked: Any
) -> None:
    async with vllm(routes={COMPLETIONS}) as server, engine_at(server) as engine:
        await engine.generate(PROMPT, asked(5, stop=("x",), stop_token_ids=(9,), min_new_tokens=2), request_id="a")
        body = server.bodies[-1]
    expected = {
        "prompt": PROMPT.tolist(),
        "model": "letters",
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["x"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 1,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    assert {key: body[key] for key in expected} == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_keeps_the_contract(vllm: Any, engine_at: Any, stream: bool) -> None:
    async with vllm() as server:
        await check_engine(engine_at(server, stream=stream), token_ids=PROMPT.tolist())


async def test_requests_above_the_concurrency_wait_here(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm() as server, engine_at(server, concurrency=3) as engine:
        server.hold_after = 1
        tasks = [asyncio.create_task(engine.generate(PROMPT, asked(), request_id=str(i))) for i in range(8)]
        await until(lambda: server.holding == 3)
        assert await engine.load() == (3, 5)
        assert engine.metrics()["requests_in_flight"] == 3
        server.release.set()
        assert all(len(completion.token_ids) == 6 for completion in await asyncio.gather(*tasks))
        assert await engine.load() == (0, 0)


async def test_proxies_of_the_environment_are_ignored(
    vllm: Any, engine_at: Any, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with vllm() as server, engine_at(server) as engine:
        await engine.generate(PROMPT, asked(), request_id="a")


async def test_the_key_is_sent_and_told_nowhere(vllm: Any, engine_at: Any, asked: Any, key_variable: str) -> None:
    async with vllm(key="secret-7", routes={COMPLETIONS}) as server:
        async with engine_at(server, api_key_env=key_variable) as engine:
            await engine.generate(PROMPT, asked(), request_id="a")
        assert "secret-7" not in repr(engine._settings)
        with pytest.raises(EngineProtocolError, match=r"HTTP 401: name the variable .* as engine\.openai\.api_key_env"):
            await engine_at(server).__aenter__()


async def test_images_are_refused(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        with pytest.raises(EngineProtocolError, match="no images"):
            await engine.generate(PROMPT, asked(), request_id="a", images=["x"])


async def test_nothing_is_sent_for_no_tokens(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        completion = await engine.generate(PROMPT, asked(0), request_id="a")
        assert completion.finish_reason.kind is FinishKind.LENGTH
        assert server.bodies == []


async def test_a_closed_engine_says_so(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm() as server:
        engine: ServerEngine = engine_at(server)
        with pytest.raises(EngineUnavailableError, match="not started"):
            await engine.generate(PROMPT, asked(), request_id="a")
        async with engine:
            server.hold_after = 1
            waiting = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
            await until(lambda: server.holding == 1)
        with pytest.raises(EngineUnavailableError):
            await waiting
        await until(lambda: server.closed == 1)


async def test_many_requests_leave_no_descriptors_and_no_tasks(
    vllm: Any, engine_at: Any, asked: Any, until: Any, num_descriptors: Any
) -> None:
    async with vllm() as server:
        async with engine_at(server, concurrency=4) as engine:
            before_tasks = len(asyncio.all_tasks())
            await asyncio.gather(*(engine.generate(PROMPT, asked(2), request_id=str(i)) for i in range(8)))
            before = num_descriptors()
            for _ in range(20):
                await asyncio.gather(*(engine.generate(PROMPT, asked(2), request_id=str(i)) for i in range(10)))
            gc.collect()
            await until(lambda: num_descriptors() <= before + 8)  # sockets of either side that idle
            await until(lambda: len(asyncio.all_tasks()) <= before_tasks + 4)  # the server's, one a connection
        assert engine.counters.requests == 208
        assert engine.counters.connection_failures <= 2
