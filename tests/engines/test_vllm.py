"""A real vLLM on the CPU as the engine.

One server for all tests, in the order in which they stand: it begins without ``--enable-scale-out``, is killed in the
middle, and has it afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.engines.servers import RealServer, vllm_server

from rollfeed.config.engine import OpenAISettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import VLLM
from rollfeed.types import Completion, FinishKind, SamplingParams, TensorUpdate, VersionSpan
from rollfeed.weights import DiskTransport

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SCALE_OUT = "--enable-scale-out"
LONG = 900
"""Tokens of a response to which something is to happen."""
CLOSE = 2e-4
"""Between vLLM and transformers, both in fp32."""
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with vllm_server(policy, tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.fixture
def engine_at(server: RealServer, policy: Path, tokenizer: Any) -> Callable[[], ServerEngine]:
    def make() -> ServerEngine:
        settings = OpenAISettings(base_url=server.address, request_timeout_seconds=600.0, startup_timeout_seconds=120.0)
        return ServerEngine(
            VLLM(settings),
            context_length=1000,
            tokenizer=tokenizer,
            transport=DiskTransport(checkpoint=policy, untied_head=True),
        )

    return make


async def until_tokens(engine: ServerEngine, task: asyncio.Task[Completion]) -> None:
    """Wait until a request is in the middle."""
    async with asyncio.timeout(120):
        while engine.metrics()["tokens_in_flight"] < 10:
            assert not task.done(), "it is over before anything could happen to it"
            await asyncio.sleep(0.005)


def assert_close(completion: Completion, expected: Any) -> None:
    assert len(completion.token_ids) == len(completion.logprobs) > 0
    np.testing.assert_allclose(completion.logprobs, expected, atol=CLOSE)


async def test_without_scale_out_completions_have_tokens_and_logprobs(
    server: RealServer, engine_at: Any, policy: Path, score: Any, prompts: Any
) -> None:
    async with aiohttp.ClientSession(server.address) as session, session.post("/inference/v1/generate", json={}) as r:
        assert r.status in (403, 404)
    asked = prompts(6)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)
    restricted = SamplingParams(max_new_tokens=24, top_p=0.9)
    async with engine_at() as engine:
        assert engine.policy_version == 0
        completions = await asyncio.gather(
            *(engine.generate(prompt, params, request_id=f"r{i}") for i, prompt in enumerate(asked))
        )
        nucleus = await engine.generate(asked[0], restricted, request_id="nucleus")
        metrics = engine.metrics()
    for prompt, completion in zip(asked, completions, strict=True):
        assert_close(completion, score(policy, prompt, completion.token_ids))
        assert completion.version_spans == (VersionSpan(0, len(completion.token_ids), 0),)
    assert (nucleus.logprobs >= score(policy, asked[0], nucleus.token_ids) - CLOSE).all()
    assert metrics["rejected_replies"] == metrics["retries"] == 0


async def check_update(engine_at: Any, changed: Any, score: Any, prompts: Any) -> None:
    """A version in the middle of a response, and another one after it."""
    (first,), asked = prompts(1), prompts(4)
    params = SamplingParams(max_new_tokens=80)
    async with engine_at() as engine:
        await engine.apply(TensorUpdate(changed(1), policy_version=1))
        long = SamplingParams(max_new_tokens=LONG)
        task = asyncio.create_task(engine.generate(first, long, request_id="r"))
        await until_tokens(engine, task)
        await engine.apply(TensorUpdate(changed(2), policy_version=2))
        after = await asyncio.gather(
            *(engine.generate(prompt, params, request_id=f"r{i}") for i, prompt in enumerate(asked))
        )
        through = await task
        await engine.apply(TensorUpdate(changed(3), policy_version=3))
        again = await engine.generate(asked[0], params, request_id="again")
    for prompt, completion in zip(asked, after, strict=True):
        assert {span.policy_version for span in completion.version_spans} == {2}
        assert_close(completion, score(changed(2), prompt, completion.token_ids))
    old, new = through.version_spans
    assert (old.policy_version, new.policy_version) == (1, 2)
    expected = np.concatenate(
        [
            score(changed(1), first, through.token_ids)[: old.end],
            score(changed(2), first, through.token_ids)[new.start :],
        ]
    )
    assert_close(through, expected)
    assert_close(again, score(changed(3), asked[0], again.token_ids))


async def test_an_update_gives_the_new_weights_to_what_runs_and_what_comes(
    engine_at: Any, changed: Any, score: Any, prompts: Any
) -> None:
    await check_update(engine_at, changed, score, prompts)


async def give(engine_at: Any, weights: Any) -> None:
    """Have the server begin as one that has just been started with these weights."""
    async with engine_at() as engine:
        await engine.apply(TensorUpdate(weights, policy_version=0))


def test_a_run_by_the_command_line_has_the_models_logprobs(
    server: RealServer, engine_at: Any, command: Any, changed: Any, score: Any
) -> None:
    asyncio.run(give(engine_at, changed(3)))
    run = command(**{"engine.openai.base_url": server.address})
    code, output = run.run("run", num_rollout=2)
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == 16
    for row in rows:
        ids = np.array(row["token_ids"], np.int32)
        num_prompt = len(ids) - row["response_length"]
        expected = score(changed(3), ids[:num_prompt], ids[num_prompt:])
        np.testing.assert_allclose(row["logprobs"], expected, atol=CLOSE)


def test_check_asks_the_server(server: RealServer, command: Any) -> None:
    code, told = command(**{"engine.openai.base_url": server.address}).check()
    assert code == 0, told
    (asked,) = told["servers"]
    assert asked["problems"] == []
    assert "8 tokens with logprobs" in asked["told"]
    assert "takes weights" in asked["told"]


def test_five_steps_of_training_stay_with_the_engine(
    server: RealServer, engine_at: Any, command: Any, policy: Path
) -> None:
    asyncio.run(give(engine_at, load_file(policy / "model.safetensors")))
    run = command(**{"engine.openai.base_url": server.address})
    code, output = run.run("train", num_rollout=5)
    assert code == 0, output
    steps = run.lines("train.jsonl")
    assert len(steps) == 5
    assert max(step["train/mismatch_abs_max"] for step in steps) < 10 * CLOSE
    assert run.lines("metrics.jsonl")[-1]["engine/weight_updates"] >= 4


def test_a_training_goes_on_when_its_server_is_back_from_the_dead(
    server: RealServer, engine_at: Any, command: Any, policy: Path
) -> None:
    asyncio.run(give(engine_at, load_file(policy / "model.safetensors")))
    run = command(**{"engine.openai.base_url": server.address, "engine.openai.max_tries": 1000})
    # Long enough that it dies under requests: when it dies during an update the run ends.
    training = run.start("train", "--set", "sampling.rollout_max_response_len=300", num_rollout=8)
    while training.poll() is None and server.told("/weight_info")["weight_version"] in ("0", "1"):
        time.sleep(0.05)
    time.sleep(0.5)
    server.kill()
    assert training.poll() is None
    server.start(SCALE_OUT)
    output, _ = training.communicate(timeout=600)
    assert training.returncode == 0, output
    steps = run.lines("train.jsonl")
    assert len(steps) == 8
    assert max(step["train/mismatch_abs_max"] for step in steps) < 10 * CLOSE
    assert "it is given them again" in output


async def test_the_route_for_tokens_is_there_with_scale_out(server: RealServer) -> None:
    body = {"model": "policy", "token_ids": [70, 71], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
    async with aiohttp.ClientSession(server.address) as session, session.post("/inference/v1/generate", json=body) as r:
        assert r.status == 200
        (choice,) = (await r.json())["choices"]
    assert [(each["start"], each["end"]) for each in choice["weight_versions"]] == [(0, 3)]


async def test_the_route_for_tokens_tells_versions_and_goes_on_from_those_of_the_server(
    server: RealServer, engine_at: Any, changed: Any, score: Any, prompts: Any
) -> None:
    (prompt,) = prompts(1)
    async with engine_at() as engine:
        begun = engine.policy_version
        assert str(begun) == server.told("/weight_info")["weight_version"]
        await engine.apply(TensorUpdate(changed(begun), policy_version=begun + 1))
        completion = await engine.generate(prompt, SamplingParams(max_new_tokens=24), request_id="r")
    assert_close(completion, score(changed(begun), prompt, completion.token_ids))
    assert completion.version_spans == (VersionSpan(0, 24, begun + 1),)


async def test_an_aborted_response_has_exact_tokens_and_goes_on_from_them(
    engine_at: Any, changed: Any, score: Any, prompts: Any
) -> None:
    (prompt,) = prompts(1)
    greedy = SamplingParams(max_new_tokens=LONG, temperature=0.0)
    async with engine_at() as engine:
        await engine.apply(TensorUpdate(changed(5), policy_version=5))
        task = asyncio.create_task(engine.generate(prompt, greedy, request_id="r"))
        await until_tokens(engine, task)
        await engine.abort("r")
        part = await task
        assert part.finish_reason.kind is FinishKind.ABORT
        assert 10 <= len(part.token_ids) < LONG
        rest = SamplingParams(max_new_tokens=16, temperature=0.0)
        resumed = await engine.generate(np.concatenate([prompt, part.token_ids]), rest, request_id="s")
        whole = SamplingParams(max_new_tokens=len(part.token_ids) + 16, temperature=0.0)
        unbroken = await engine.generate(prompt, whole, request_id="w")
    assert_close(part, score(changed(5), prompt, part.token_ids))
    assert unbroken.token_ids.tolist() == [*part.token_ids.tolist(), *resumed.token_ids.tolist()]
    np.testing.assert_allclose(unbroken.logprobs, np.concatenate([part.logprobs, resumed.logprobs]), atol=CLOSE)


async def test_a_pause_holds_what_runs_and_a_version_named_meanwhile_has_an_exact_border(
    server: RealServer, engine_at: Any, prompts: Any
) -> None:
    (prompt,) = prompts(1)
    async with engine_at() as engine, aiohttp.ClientSession(server.address) as session:
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=LONG), request_id="r"))
        await until_tokens(engine, task)
        await engine.pause()
        await asyncio.sleep(1.0)
        held = int(engine.metrics()["tokens_in_flight"])
        await asyncio.sleep(0.5)
        assert engine.metrics()["tokens_in_flight"] == held < LONG
        begun = engine.policy_version
        async with session.post("/update_weight_version", json={"new_version": str(begun + 1)}) as reply:
            assert reply.status == 200
        await engine.resume()
        completion = await task
    assert completion.version_spans == (VersionSpan(0, held, begun), VersionSpan(held, LONG, begun + 1))


async def test_an_update_by_the_route_for_tokens_does_so_too(
    engine_at: Any, changed: Any, score: Any, prompts: Any
) -> None:
    await check_update(engine_at, changed, score, prompts)
