"""A real SGLang on the CPU as the engine.

One server for all tests, in the order in which they stand: the last one kills it. It serves fp32 checkpoints in
fp16, and prepares no step while one runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.engines.servers import RealServer, sglang_server

from rollfeed.config.engine import SGLangSettings
from rollfeed.config.train import TrainSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.testing import make_sample
from rollfeed.training.trainer import Trainer
from rollfeed.types import Completion, FinishKind, SamplingParams, TensorUpdate, VersionSpan
from rollfeed.weights import DiskTransport

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

FAR = 0.1
"""Of a token, at most, between fp16 and fp32; what other weights say is ten times as far."""
ON_AVERAGE = 0.02
CAPTURED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "engine" / "server" / "data" / "sglang_wire_0523.json").read_text()
)


@pytest.fixture(scope="module")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with sglang_server(policy, tmp_path_factory.mktemp("sglang")) as running:
        yield running


@pytest.fixture
def engine_at(server: RealServer, policy: Path, tokenizer: Any) -> Callable[..., ServerEngine]:
    def make(**changes: Any) -> ServerEngine:
        settings = SGLangSettings(workers=(server.address,), concurrency=16, startup_timeout_seconds=120.0, **changes)
        return ServerEngine(
            SGLang(settings), context_length=1000, tokenizer=tokenizer, transport=DiskTransport(checkpoint=policy)
        )

    return make


async def until_tokens(server: RealServer, count: int, task: asyncio.Task[Completion]) -> None:
    """Wait until a request is in the middle: so many tokens, its prompt included, are in the server."""
    async with asyncio.timeout(120), aiohttp.ClientSession(server.address) as session:
        while True:
            async with session.get("/v1/loads?include=core") as reply:
                (load,) = (await reply.json())["loads"]
            if load["num_running_reqs"] and load["num_used_tokens"] >= count:
                return
            assert not task.done(), "it is over before anything could happen to it"
            await asyncio.sleep(0.005)


def assert_close(logprobs: Any, expected: Any) -> None:
    assert len(logprobs) == len(expected) > 0
    differences = np.abs(np.asarray(logprobs) - expected)
    assert differences.max() < FAR
    assert differences.mean() < ON_AVERAGE


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return "number" if type(value) in (int, float) else type(value).__name__


async def test_replies_are_those_that_the_fake_was_made_after(server: RealServer) -> None:
    async with aiohttp.ClientSession(server.address) as session:
        body = {**CAPTURED["generate_greedy"]["request"], "input_ids": [70, 71, 72]}
        async with session.post("/generate", json=body) as reply:
            meta = (await reply.json())["meta_info"]
        async with session.get("/server_info") as reply:
            info = await reply.json()
    captured = CAPTURED["generate_greedy"]["reply"]["meta_info"]
    assert info["version"] == "0.5.23"
    assert info["disable_overlap_schedule"] is True
    assert meta.keys() == captured.keys()
    cached = {"cached_tokens_details"}  # null without a cached token
    assert shape({key: meta[key] for key in meta.keys() - cached}) == shape(
        {key: captured[key] for key in meta.keys() - cached}
    )
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]


async def test_responses_have_the_models_logprobs_and_the_servers_version(
    engine_at: Any, policy: Path, score: Any, prompts: Any
) -> None:
    asked = prompts(6)
    params = SamplingParams(max_new_tokens=24)
    async with engine_at() as engine:
        assert engine.policy_version == 0
        completions = await asyncio.gather(
            *(engine.generate(prompt, params, request_id=f"r{i}") for i, prompt in enumerate(asked))
        )
        metrics = engine.metrics()
    for prompt, completion in zip(asked, completions, strict=True):
        assert_close(completion.logprobs, score(policy, prompt, completion.token_ids))
        assert completion.version_spans == (VersionSpan(0, len(completion.token_ids), 0),)
    assert metrics["rejected_replies"] == metrics["retries"] == 0


async def test_ratios_of_restricted_sampling_are_1_among_what_the_server_kept(
    engine_at: Callable[..., ServerEngine], policy: Path
) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.7, top_k=50, min_new_tokens=4)
    prompt = np.arange(3, 14, dtype=np.int32)
    async with engine_at() as engine:
        asked = [replace(params, seed=seed, return_sampling_mask=True) for seed in range(4)]
        answers = await asyncio.gather(*(engine.generate(prompt, each, request_id=str(each.seed)) for each in asked))
    settings = TrainSettings(device="cpu", threads=1)
    trainer = Trainer(policy, settings=settings, temperature=0.8, num_batches=1, max_response_length=24)
    samples = [
        replace(
            make_sample("x" * len(each.token_ids)),
            token_ids=np.concatenate([prompt, each.token_ids]),
            sampling_mask=each.sampling_mask,
        )
        for each in answers
    ]
    sampled = np.concatenate([each.logprobs for each in answers])
    assert_close(np.concatenate(trainer.logprobs(samples)), sampled)
    whole = np.concatenate(trainer.logprobs([replace(sample, sampling_mask=None) for sample in samples]))
    assert (sampled - whole).mean() > 5 * ON_AVERAGE
    assert all(1 <= length <= 50 for each in answers for length in each.sampling_mask.lengths)


async def test_an_aborted_response_has_exact_tokens_and_can_be_gone_on_from(
    server: RealServer, engine_at: Any, policy: Path, score: Any, prompts: Any
) -> None:
    (prompt,) = prompts(1)
    async with engine_at() as engine:
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=600), request_id="r"))
        await until_tokens(server, len(prompt) + 10, task)
        await engine.abort("r")
        part = await task
        assert part.finish_reason.kind is FinishKind.ABORT
        assert 10 <= len(part.token_ids) < 600
        longer = np.concatenate([prompt, part.token_ids])
        rest = await engine.generate(longer, SamplingParams(max_new_tokens=16), request_id="s")
    assert_close(part.logprobs, score(policy, prompt, part.token_ids))
    assert_close(rest.logprobs, score(policy, longer, rest.token_ids))


async def test_a_pause_longer_than_its_probes_takes_no_server_out(
    server: RealServer, engine_at: Any, prompts: Any
) -> None:
    (prompt,) = prompts(1)
    async with engine_at(probe_interval_seconds=0.5, probe_timeout_seconds=2.0) as engine:
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=100), request_id="r"))
        await until_tokens(server, len(prompt) + 5, task)
        await engine.pause()
        await asyncio.sleep(22.0)
        assert not task.done()
        assert engine.metrics()["dead_workers"] == 0
        await engine.resume()
        assert len((await task).token_ids) == 100
        assert engine.metrics()["dead_workers"] == 0


@pytest.mark.parametrize(("mode", "version"), [("abort", 10), ("retract", 20), ("in_place", 30)])
async def test_an_update_gives_the_new_weights_to_what_runs_and_what_comes(
    server: RealServer, engine_at: Any, changed: Any, score: Any, prompts: Any, mode: str, version: int
) -> None:
    (first,), asked = prompts(1), prompts(4)
    params = SamplingParams(max_new_tokens=120)
    old_weights, new_weights = changed(version), changed(version + 1)
    async with engine_at(weight_update=mode) as engine:
        await engine.apply(TensorUpdate(old_weights, policy_version=version))
        task = asyncio.create_task(engine.generate(first, params, request_id="r"))
        await until_tokens(server, len(first) + 10, task)
        begun = time.monotonic()
        await engine.apply(TensorUpdate(new_weights, policy_version=version + 1))
        seconds = time.monotonic() - begun
        after = await asyncio.gather(
            *(engine.generate(prompt, params, request_id=f"r{i}") for i, prompt in enumerate(asked))
        )
        through = await task
        assert engine.metrics()["dead_workers"] == 0
    for prompt, completion in zip(asked, after, strict=True):
        assert {span.policy_version for span in completion.version_spans} == {version + 1}
        assert_close(completion.logprobs, score(new_weights, prompt, completion.token_ids))
    old, new = through.version_spans
    assert (old.policy_version, new.policy_version) == (version, version + 1)
    assert_close(through.logprobs[: old.end], score(old_weights, first, through.token_ids)[: old.end])
    if mode != "in_place":  # there keys and values of the old weights are kept, which no forward pass has
        assert_close(through.logprobs[new.start :], score(new_weights, first, through.token_ids)[new.start :])
    print(f"{mode}: an update under a running request took {seconds:.2f} s")


async def test_a_request_through_several_updates_has_a_span_for_each(
    server: RealServer, engine_at: Any, changed: Any, prompts: Any
) -> None:
    (prompt,) = prompts(1)
    async with engine_at(weight_update="retract") as engine:
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_new_tokens=300), request_id="r"))
        for index in range(3):
            await until_tokens(server, len(prompt) + 10 + 40 * index, task)
            await engine.apply(TensorUpdate(changed(40 + index), policy_version=40 + index))
        completion = await task
    assert [span.policy_version for span in completion.version_spans][1:] == [40, 41, 42]
    assert completion.version_spans[-1].end == len(completion.token_ids)


async def test_weights_change_during_a_pause_of_the_caller(
    server: RealServer, engine_at: Any, changed: Any, score: Any, prompts: Any
) -> None:
    first, asked = prompts(2)
    for version, mode in ((50, "abort"), (51, "retract"), (52, "in_place")):
        async with engine_at(weight_update=mode) as engine:
            task = asyncio.create_task(engine.generate(first, SamplingParams(max_new_tokens=100), request_id="r"))
            await until_tokens(server, len(first) + 10, task)
            await engine.pause()
            await engine.apply(TensorUpdate(changed(version), policy_version=version))
            await engine.resume()
            through = await task
            assert through.version_spans[-1].policy_version == version
            assert len(through.token_ids) == 100
    # After an update in place a prompt that is new has no older keys and values.
    async with engine_at() as engine:
        completion: Completion = await engine.generate(asked, SamplingParams(max_new_tokens=16), request_id="s")
    assert_close(completion.logprobs, score(changed(52), asked, completion.token_ids))


async def test_a_cached_prompt_is_computed_again_after_an_update_in_place(
    server: RealServer, engine_at: Any, changed: Any, score: Any, prompts: Any
) -> None:
    first, again = prompts(2)
    params = SamplingParams(max_new_tokens=16)
    async with engine_at(weight_update="in_place") as engine:
        await engine.apply(TensorUpdate(changed(60), policy_version=60))
        await engine.generate(again, params, request_id="before")
        task = asyncio.create_task(engine.generate(first, SamplingParams(max_new_tokens=200), request_id="r"))
        await until_tokens(server, len(first) + 10, task)
        await engine.apply(TensorUpdate(changed(61), policy_version=61))
        assert not task.done()  # so that the server has flushed nothing
        completion: Completion = await engine.generate(again, params, request_id="after")
        await task
    assert_close(completion.logprobs, score(changed(61), again, completion.token_ids))


async def give(engine_at: Any, weights: Any) -> None:
    """Have the server begin as one that has just been started with these weights."""
    async with engine_at() as engine:
        await engine.apply(TensorUpdate(weights, policy_version=0))


def test_a_run_by_the_command_line_has_the_models_logprobs(
    server: RealServer, engine_at: Any, command: Any, changed: Any, score: Any
) -> None:
    asyncio.run(give(engine_at, changed(3)))
    run = command(**{"engine.sglang.workers": [server.address]})
    code, output = run.run("run", num_rollout=2)
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == 16
    for row in rows:
        ids = np.array(row["token_ids"], np.int32)
        num_prompt = len(ids) - row["response_length"]
        assert_close(row["logprobs"], score(changed(3), ids[:num_prompt], ids[num_prompt:]))


def test_check_asks_the_server(server: RealServer, command: Any) -> None:
    code, told = command(**{"engine.sglang.workers": [server.address]}).check()
    assert code == 0, told
    (asked,) = told["servers"]
    assert asked["problems"] == []
    assert "8 tokens with logprobs" in asked["told"]
    assert "takes weights" in asked["told"]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_five_steps_of_training_stay_with_the_engine(
    server: RealServer, engine_at: Any, command: Any, policy: Path, mode: str
) -> None:
    asyncio.run(give(engine_at, load_file(policy / "model.safetensors")))
    run = command(**{"engine.sglang.workers": [server.address], "engine.sglang.weight_update": mode})
    code, output = run.run("train", num_rollout=5)
    assert code == 0, output
    steps = run.lines("train.jsonl")
    assert len(steps) == 5
    assert max(step["train/mismatch_abs"] for step in steps) < ON_AVERAGE
    assert run.lines("metrics.jsonl")[-1]["engine/weight_updates"] >= 4


def test_a_training_goes_on_when_its_server_is_back_from_the_dead(
    server: RealServer, engine_at: Any, command: Any, policy: Path
) -> None:
    asyncio.run(give(engine_at, load_file(policy / "model.safetensors")))
    run = command(**{"engine.sglang.workers": [server.address], "engine.sglang.probe_interval_seconds": 1.0})
    # Long enough that it dies under requests: when it dies during an update the run ends.
    training = run.start("train", "--set", "sampling.rollout_max_response_len=300", num_rollout=8)
    while training.poll() is None and server.told("/model_info")["weight_version"] in ("0", "1"):
        time.sleep(0.05)
    time.sleep(0.5)
    server.kill()
    assert training.poll() is None
    server.start()
    output, _ = training.communicate(timeout=600)
    assert training.returncode == 0, output
    steps = run.lines("train.jsonl")
    assert len(steps) == 8
    assert max(step["train/mismatch_abs"] for step in steps) < ON_AVERAGE
    assert run.lines("metrics.jsonl")[-1]["engine/readmitted_workers"] >= 1
