"""Which version sampled which token, where a server names its versions, and servers that have lost theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import TensorUpdate

PROMPT = np.array([112, 113, 114], np.int32)
TENSORS = {"a": np.ones((2, 2), np.float32)}
COMPLETIONS = "/v1/completions"


def spans(completion: Any) -> list[tuple[int, int, int]]:
    return [tuple(span) for span in completion.version_spans]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_server_is_told_the_version_and_its_spans_are_read(
    vllm: Any, engine_at: Any, asked: Any, stream: bool
) -> None:
    async with vllm(weight_version="default") as server, engine_at(server, stream=stream) as engine:
        await engine.apply(TensorUpdate(TENSORS, policy_version=7))
        assert server.weight_version == "7"
        assert spans(await engine.generate(PROMPT, asked(), request_id="a")) == [(0, 6, 7)]
        server.new_version = (2, "9")  # somebody else's, between two tokens
        assert spans(await engine.generate(PROMPT, asked(), request_id="b")) == [(0, 2, 7), (2, 6, 9)]


async def test_a_run_begins_at_the_version_that_the_server_names(vllm: Any, engine_at: Any) -> None:
    async with vllm(weight_version="step-5") as server, engine_at(server) as engine:
        assert engine.policy_version == 5
    # Without the routes that change weights, its first reply says it.
    async with vllm(weight_version="6", has_dev_routes=False) as server, engine_at(server) as engine:
        assert engine.policy_version == 6
    async with vllm() as server, engine_at(server) as engine:
        assert engine.policy_version == 0


@pytest.mark.parametrize("has_dev_routes", [True, False])
async def test_a_name_that_is_no_policy_version_is_refused_with_what_to_do(
    vllm: Any, engine_at: Any, has_dev_routes: bool
) -> None:
    async with vllm(weight_version="1795878903.01", has_dev_routes=has_dev_routes) as server:
        server.routes = {"/inference/v1/generate"}
        with pytest.raises(EngineProtocolError) as caught:
            await engine_at(server).__aenter__()
    assert server.address in str(caught.value)
    assert "'1795878903.01'" in str(caught.value)
    assert "/update_weight_version" in str(caught.value)


async def test_spans_that_do_not_fit_the_tokens_are_refused(vllm: Any, engine_at: Any, asked: Any) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        told = [{"version": "default", "start": 0, "end": 1}]
        logprobs = {"content": [{"token": "token_id:97", "logprob": -0.5}] * 2}
        choice = {"token_ids": [97, 97], "logprobs": logprobs, "finish_reason": "length", "weight_versions": told}
        return web.json_response({"choices": [choice]})

    async with vllm() as server, engine_at(server) as engine:
        server.faults = [answer]
        with pytest.raises(EngineProtocolError, match=r"http://.*weight_versions: .*cover 1 of 2"):
            await engine.generate(PROMPT, asked(), request_id="a")


async def test_a_server_that_has_lost_its_weights_is_given_them_before_it_is_asked_again(
    vllm: Any, engine_at: Any, asked: Any
) -> None:
    async with vllm(weight_version="default") as server, engine_at(server) as engine:
        await engine.apply(TensorUpdate(TENSORS, policy_version=3))
        server.weight_version = "default"  # as after a restart
        first, second = await asyncio.gather(
            *(engine.generate(PROMPT, asked(), request_id=name) for name in ("a", "b"))
        )
        assert (spans(first), spans(second)) == ([(0, 6, 3)], [(0, 6, 3)])
        assert [path for path, _ in server.calls].count("/collective_rpc") == 2
        assert engine.metrics()["stale_replies"] >= 1
        assert engine.metrics()["weight_updates"] == 1


async def test_a_lost_connection_makes_the_version_be_asked_for(vllm: Any, engine_at: Any, asked: Any) -> None:
    async def restart(request: web.Request) -> web.StreamResponse:
        server.weight_version = "default"
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with vllm(weight_version="default", routes={COMPLETIONS}) as server, engine_at(server) as engine:
        await engine.apply(TensorUpdate(TENSORS, policy_version=3))
        server.faults = [restart]
        assert spans(await engine.generate(PROMPT, asked(), request_id="a")) == [(0, 6, 3)]
        assert server.weight_version == "3"


async def test_older_weights_of_which_there_is_no_copy_stop_everything(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(weight_version="4") as server, engine_at(server) as engine:
        server.weight_version = "3"
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="serves version 3, 4 is current"):
                await engine.generate(PROMPT, asked(), request_id="a")
        assert len(server.bodies) == 1


async def test_a_server_that_keeps_the_old_name_has_no_requests(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm(weight_version="3", takes_names=False) as server, engine_at(server) as engine:
        with pytest.raises(EngineUnavailableError, match="serves version 3 after an update to 4"):
            await engine.apply(TensorUpdate(TENSORS, policy_version=4))
        with pytest.raises(EngineUnavailableError):
            await engine.generate(PROMPT, asked(), request_id="a")
        assert server.bodies == []
