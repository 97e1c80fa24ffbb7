"""An aborted request returns its tokens so far, at once and wherever it is; others are not touched."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollfeed.types import FinishKind

PROMPT = np.array([112, 113, 114], np.int32)


async def test_an_abort_by_id_returns_what_was_streamed_and_closes_the_connection(
    vllm: Any, engine_at: Any, asked: Any, rescored: Any, until: Any
) -> None:
    async with vllm() as server, engine_at(server) as engine:
        server.hold_after = 3
        first = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        second = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="ab"))
        await until(lambda: engine.metrics()["tokens_in_flight"] == 6)
        await engine.abort("a")
        completion = await first
        assert completion.finish_reason.kind is FinishKind.ABORT
        assert len(completion.token_ids) == len(completion.logprobs) == 3
        expected = rescored(PROMPT.tolist(), completion.token_ids.tolist())
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        await until(lambda: server.closed == 1)
        assert not second.done()
        server.release.set()
        assert (await second).finish_reason.kind is FinishKind.LENGTH
        assert engine.counters.closed_requests == 1
        assert engine.counters.closed_tokens == 3


async def test_an_abort_of_all_ends_what_runs_and_what_waits(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm() as server, engine_at(server, concurrency=2) as engine:
        server.hold_after = 2
        tasks = [asyncio.create_task(engine.generate(PROMPT, asked(), request_id=str(i))) for i in range(5)]
        await until(lambda: engine.metrics()["tokens_in_flight"] == 4)
        await engine.abort()
        completions = await asyncio.gather(*tasks)
        assert {completion.finish_reason.kind for completion in completions} == {FinishKind.ABORT}
        assert sorted(len(completion.token_ids) for completion in completions) == [0, 0, 0, 2, 2]
        await until(lambda: server.closed == 2)
        assert await engine.load() == (0, 0)


async def test_without_streaming_an_aborted_request_has_nothing(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    async with vllm() as server, engine_at(server, stream=False) as engine:
        server.hold_after = 2
        task = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: server.holding == 1)
        await engine.abort("a")
        completion = await task
        assert (completion.finish_reason.kind, len(completion.token_ids)) == (FinishKind.ABORT, 0)
        await until(lambda: server.closed == 1)


async def test_an_abort_of_what_is_not_there_is_fine(vllm: Any, engine_at: Any, asked: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        await engine.abort("nobody")
        await engine.abort()
        assert len((await engine.generate(PROMPT, asked(), request_id="a")).token_ids) == 6


async def test_a_request_aborted_between_two_tries_is_not_sent_again(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    from aiohttp import web

    async def busy(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "60"})

    async with vllm(faults=[busy]) as server, engine_at(server) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: engine.counters.refused_requests == 1)
        await engine.abort("a")
        assert (await task).finish_reason.kind is FinishKind.ABORT
        assert len(server.bodies) == 1


async def test_for_evaluation_an_aborted_request_has_its_text_so_far(
    vllm: Any, engine_at: Any, asked: Any, until: Any
) -> None:
    async with vllm(ids="none", routes={"/v1/completions"}) as server, engine_at(server, exact=False) as engine:
        server.hold_after = 2
        task = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: engine.metrics()["tokens_in_flight"] == 2)
        await engine.abort("a")
        completion = await task
        assert (completion.finish_reason.kind, len(completion.text)) == (FinishKind.ABORT, 2)


async def test_a_cancelled_request_closes_its_connection(vllm: Any, engine_at: Any, asked: Any, until: Any) -> None:
    async with vllm() as server, engine_at(server) as engine:
        server.hold_after = 2
        task = asyncio.create_task(engine.generate(PROMPT, asked(), request_id="a"))
        await until(lambda: server.holding == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.closed == 1)
        assert await engine.load() == (0, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_aborts_at_any_moment_leave_prefixes_and_nothing_behind(
    vllm: Any, engine_at: Any, asked: Any, rescored: Any, seed: int
) -> None:
    random = np.random.default_rng(seed)
    async with vllm() as server, engine_at(server, concurrency=8) as engine:
        tasks = [asyncio.create_task(engine.generate(PROMPT, asked(40, seed=i), request_id=str(i))) for i in range(30)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(float(random.uniform(0, 0.003)))
            await engine.abort(str(random.integers(30)))
        for task in tasks:
            completion = task.result()
            expected = rescored(PROMPT.tolist(), completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            is_whole = len(completion.token_ids) == 40
            assert completion.finish_reason.kind is (FinishKind.LENGTH if is_whole else FinishKind.ABORT)
        assert await engine.load() == (0, 0)
