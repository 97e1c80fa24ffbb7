"""Who scores what in a run and in an evaluation: rewards of samples' own, verifiers of environments, functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfeed import app
from rollfeed.app import open_rollouts
from rollfeed.config import EvalSettings, RolloutConfig, SamplingSettings
from rollfeed.environments import EnvironmentRegistry, EnvironmentSource
from rollfeed.errors import RunFailedError
from rollfeed.filters import RewardStd
from rollfeed.prompts import ChatRenderer, MixtureSource
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine
from rollfeed.types import Prompt, Sample, TrainBatch

ENVIRONMENT = "core/add_numbers"


def digit(sample: Sample, prompt: Prompt) -> float:
    return float(sample.response)


def rewards_of(batch: TrainBatch) -> list[Any]:
    return [sample.reward for sample in batch.samples]


async def batch_of(config: RolloutConfig, source: Any = None, **settings: Any) -> TrainBatch:
    source = source or ListSource([f"prompt {number}" for number in range(20)])
    engine = ScriptedEngine(answer=lambda _: "5")
    async with open_rollouts(config, source=source, engine=engine, tokenizer=CharTokenizer(), **settings) as rollouts:
        return await rollouts.generate_batch()


def forking(*rewards: Any) -> Any:
    """Return a generate function whose rollouts have a sample for each reward; those of odd ones 1 each."""

    async def generate(request: Any, *, services: Any) -> list[Sample]:
        (sample,) = await services.default(request, services=services)
        own = rewards if request.index % 2 == 0 else [1.0 if reward is not None else None for reward in rewards]
        return [replace(sample, index=10 * sample.index + i, reward=reward) for i, reward in enumerate(own)]

    return generate


@pytest.mark.parametrize(
    ("given", "kept", "mean"),
    [
        ((0.2, 0.9), [0.2, 0.9], 0.55),
        ((0.2, None), [0.2, 5.0], 2.6),
        ((None, 0.0), [5.0, 0.0], 2.5),
        ((None, None), [5.0, 5.0], 5.0),
    ],
)
@pytest.mark.parametrize("kind", ["reward", "batched_reward", "group_reward"])
async def test_samples_keep_their_own_rewards_and_what_has_none_is_scored(
    given: tuple[Any, ...], kept: list[float], mean: float, kind: str
) -> None:
    def together(samples: Sequence[Sample], _prompts: Any) -> list[float]:
        return [float(sample.response) for sample in samples]

    config = RolloutConfig(
        rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        plugins={"generate": forking(*given), kind: digit if kind == "reward" else together},
    )
    batch = await batch_of(config)
    for group in batch.groups:
        forked, other = group.rollouts
        assert [sample.reward for sample in forked.samples] == kept
        assert forked.verdict is not None
        assert forked.verdict.reward == pytest.approx(mean)
        baseline = (mean + other.get_reward_value()) / 2
        np.testing.assert_allclose(group.reward_values(), [mean, other.get_reward_value()])
        rows = [row for row, sample in enumerate(batch.samples) if sample.rollout_id == forked.rollout_id]
        np.testing.assert_allclose(batch.advantages_S[rows], np.array(kept) - baseline, rtol=1e-5, atol=1e-6)
    assert batch.metrics["rollout/reward_mean"] == pytest.approx(baseline)


async def test_filters_read_the_reward_of_the_rollout_not_of_its_samples() -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": 2, "max_draws_per_batch": 2},
        plugins={"generate": forking(0.0, 2.0), "group_filters": (RewardStd(n_samples_per_prompt=2),)},
    )
    with pytest.raises(RunFailedError, match=r"2 dropped as zero_std_1\.0"):
        await batch_of(config)


def environment_prompts() -> EnvironmentSource:
    renderer = ChatRenderer(CharTokenizer(), rollout_max_prompt_len=1_000)
    return EnvironmentSource(EnvironmentRegistry().get(ENVIRONMENT), level=0, seed=0, renderer=renderer)


def mixed() -> MixtureSource:
    texts = ListSource([f"prompt {number}" for number in range(20)], repeat=True)
    return MixtureSource([("texts", 1.0, texts), ("problems", 1.0, environment_prompts())], seed=0)


@pytest.mark.parametrize("kind", ["reward", "batched_reward", "group_reward"])
@pytest.mark.parametrize("overrides", [False, True])
async def test_a_reward_function_scores_data_sets_and_environments_verify_their_own(kind: str, overrides: bool) -> None:
    def one(sample: Sample, prompt: Prompt) -> dict[str, float]:
        return {"score": 9.0, "style": 0.0}

    def several(samples: Sequence[Sample], _prompts: Any) -> list[dict[str, float]]:
        return [{"score": 9.0, "style": 0.0}] * len(samples)

    config = RolloutConfig(
        rollout={"rollout_batch_size": 12, "n_samples_per_prompt": 2},
        reward={"reward_key": "score", "override_environments": overrides},
        plugins={kind: one if kind == "reward" else several},
    )
    batch = await batch_of(config, mixed())
    kinds = {"environment" in group.prompt.metadata for group in batch.groups}
    assert kinds == {False, True}
    for group in batch.groups:
        is_function = overrides or "environment" not in group.prompt.metadata
        assert (group.reward_values("score").tolist() == [9.0, 9.0]) is is_function
        assert all(rollout.verdict.correct != "undefined" for rollout in group.rollouts) is not is_function


@pytest.mark.parametrize("overrides", [False, True])
async def test_environments_verify_their_own_in_evaluation_too(overrides: bool) -> None:
    config = RolloutConfig(
        rollout={"n_samples_per_prompt": 2},
        reward={"override_environments": overrides},
        plugins={"reward": lambda sample, prompt: 0.0},
    )
    settings = EvalSettings(environments=[{"id": ENVIRONMENT, "num_prompts": 4}])
    prepared = app.prepare_evaluation(settings, config=config, tokenizer=CharTokenizer(), context_length=1_000)
    answers = {prompt.text: str(sum(prompt.metadata["params"]["terms"])) for prompt in prepared.sets[0].prompts}
    tokenizer = CharTokenizer()
    engine = ScriptedEngine(
        answer=lambda request: answers[tokenizer.decode(request.token_ids, skip_special_tokens=True)]
    )
    async with engine:
        found = await app.evaluate(prepared, engine=engine)
    assert found.accuracy == (0.0 if overrides else 1.0)


async def test_generate_functions_are_told_whether_they_are_evaluated() -> None:
    told: set[bool] = set()

    async def generate(request: Any, *, services: Any) -> Any:
        told.add(request.evaluation)
        return await services.default(request, services=services)

    config = RolloutConfig(
        rollout={"n_samples_per_prompt": 2, "rollout_batch_size": 2}, plugins={"generate": generate, "reward": digit}
    )
    await batch_of(config)
    assert told == {False}
    told.clear()
    settings = EvalSettings(environments=[{"id": ENVIRONMENT, "num_prompts": 2}])
    prepared = app.prepare_evaluation(settings, config=config, tokenizer=CharTokenizer(), context_length=1_000)
    async with ScriptedEngine() as engine:
        await app.evaluate(prepared, engine=engine)
    assert told == {True}


async def all_at_once(count: int) -> Any:
    everybody = asyncio.Barrier(count)

    async def reward(sample: Sample, prompt: Prompt) -> float:
        await everybody.wait()
        return 1.0

    return reward


async def test_all_async_rewards_of_a_step_are_computed_at_once() -> None:
    config = RolloutConfig(
        rollout={"rollout_batch_size": 64, "n_samples_per_prompt": 4}, plugins={"reward": await all_at_once(256)}
    )
    source = ListSource([f"prompt {number}" for number in range(64)])
    batch = await asyncio.wait_for(batch_of(config, source), 300.0)
    assert rewards_of(batch) == [1.0] * 256


async def test_all_async_rewards_of_an_evaluation_are_computed_at_once_whatever_the_engine_holds() -> None:
    config = RolloutConfig(
        rollout={"n_samples_per_prompt": 1, "max_requests_in_flight": 4},
        reward={"override_environments": True},
        plugins={"reward": await all_at_once(64)},
        sampling=SamplingSettings(rollout_max_response_len=8),
    )
    settings = EvalSettings(environments=[{"id": ENVIRONMENT, "level": 2, "num_prompts": 64}])
    prepared = app.prepare_evaluation(settings, config=config, tokenizer=CharTokenizer(), context_length=1_000)
    async with ScriptedEngine(max_running_requests=2) as engine:
        found = await asyncio.wait_for(app.evaluate(prepared, engine=engine), 300.0)
    assert found.accuracy == 1.0


async def test_reward_concurrency_bounds_the_calls_of_a_run() -> None:
    running = peak = 0

    async def reward(sample: Sample, prompt: Prompt) -> float:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(50):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    await batch_of(
        RolloutConfig(
            rollout={"rollout_batch_size": 8, "n_samples_per_prompt": 4},
            reward={"concurrency": 3},
            plugins={"reward": reward},
        )
    )
    assert peak == 3
