"""Rollouts for the asynchronous trainer: its protocols, samples, versions, rewards and health."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.app.inside_trl.trainers import ASYNC, GRPO, Rows, logprobs_of

from rollfeed.compat.trl import AsyncRollouts
from rollfeed.config import EngineSettings, PluginSettings, RewardSettings, RolloutConfig
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.plugins import check_methods
from rollfeed.types import Drop, Keep, Sample

ENGINE = EngineSettings(num_slots=8, context_length=64, threads=1)
ONE_BATCH = {"max_staleness": 1}
"""Only the groups of a batch are answered at a time: of more, those are its batch that end first."""
SECONDS = 120.0
"""A busy machine needs longer than a test should."""


def remainders(completions: list[Any], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
    assert [said[0]["role"] for said in completions] == ["assistant"] * len(completions)
    return [float(sum(ids) % 7) for ids in completion_ids]


async def labels(label: list[str], **_: Any) -> list[float | None]:
    return [float(each) if each != "5" else None for each in label]


@pytest.fixture
def make(tiny_checkpoint: Path, chats: Rows) -> Iterator[Callable[..., AsyncRollouts]]:
    made: list[AsyncRollouts] = []

    def make_one(*, rows: Rows = chats, reward_funcs: Any = (remainders, labels), **given: Any) -> AsyncRollouts:
        settings = {name: given.pop(name) for name in ("config", "label_key", "metadata_key") if name in given}
        args = SimpleNamespace(**{**GRPO, **ASYNC, **given})
        rollouts = AsyncRollouts(
            tiny_checkpoint, args=args, train_dataset=rows, reward_funcs=reward_funcs, engine=ENGINE, **settings
        )
        made.append(rollouts)
        return rollouts

    yield make_one
    for rollouts in made:
        rollouts.destroy()


def begin(rollouts: AsyncRollouts, model: Any, *, version: int = 1) -> None:
    """Do what the trainer does before its first step."""
    rollouts.init_weight_transfer()
    give(rollouts, model, version)
    rollouts.start()


def give(rollouts: AsyncRollouts, model: Any, version: int) -> None:
    rollouts.pause()
    rollouts.send_weights(model.named_parameters())
    rollouts.resume()
    rollouts.update_model_version(version)


def take(rollouts: AsyncRollouts, count: int = 6) -> list[Any]:
    return [rollouts.rollout_buffer.get(timeout=SECONDS) for _ in range(count)]


@pytest.fixture
def model(tiny_checkpoint: Path) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


def test_it_is_a_worker_and_a_weight_transfer(make: Any) -> None:
    from trl.experimental.async_grpo import RolloutWorkerProtocol, WeightTransferProtocol

    rollouts = make()
    check_methods(rollouts, RolloutWorkerProtocol, key="rollout_worker")
    check_methods(rollouts, WeightTransferProtocol, key="weight_transfer")
    assert isinstance(rollouts.rollout_buffer, queue.Queue)
    assert isinstance(rollouts.metrics_queue, queue.Queue)


def test_samples_are_as_trl_has_them(make: Any, model: Any, chats: Rows) -> None:
    rollouts = make(**ONE_BATCH)
    begin(rollouts, model)
    samples = take(rollouts)
    assert rollouts.metrics_queue.get(timeout=SECONDS)["rollout/reward_mean"] > 0
    for sample in samples:
        num_prompt = int(np.argmax(sample.completion_mask))
        assert sample.input_ids.dtype == sample.completion_mask.dtype == np.int64
        assert sample.old_log_probs.dtype == np.float32
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert not sample.old_log_probs[:num_prompt].any()
        ids = sample.input_ids.tolist()
        expected = logprobs_of(model, ids[:num_prompt], ids[num_prompt:], GRPO["temperature"])
        np.testing.assert_allclose(sample.old_log_probs[num_prompt:], expected, atol=1e-4)
        assert sample.prompt == chats[sample.group_id]["prompt"]
        assert sample.metrics["rewards/remainders"] == sum(ids[num_prompt:]) % 7
        assert sample.metrics["rewards/labels"] == sample.group_id
        assert sample.metrics["reward"] == sample.metrics["rewards/remainders"] + sample.metrics["rewards/labels"]
        assert sample.model_version == 1
    for group_id in (0, 1):
        group = [sample for sample in samples if sample.group_id == group_id]
        rewards = np.array([sample.metrics["reward"] for sample in group])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        np.testing.assert_allclose([sample.advantage for sample in group], expected, atol=1e-3)


def test_samples_are_of_the_weights_that_trl_allows_by_its_numbers(make: Any, model: Any) -> None:
    import torch

    rollouts = make(max_staleness=2)
    begin(rollouts, model, version=11)
    for version in range(12, 16):
        for sample in take(rollouts):
            assert version - 1 - 2 <= sample.model_version < version  # the trainer's own is version - 1 here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape)
        give(rollouts, model, version)


def test_no_batch_is_begun_before_the_last_sample_is_taken_although_a_trainer_waits(make: Any, model: Any) -> None:
    rollouts = make()
    put, generate, begun = rollouts.rollout_buffer.put, rollouts._rollouts.generate_batch, threading.Semaphore(0)
    taken: list[Any] = []

    def put_for_one_who_waits(sample: Any) -> None:
        if taken:
            put(sample)
        else:
            taken.append(sample)
            rollouts._emptied()

    async def generate_batch() -> Any:
        begun.release()
        return await generate()

    rollouts.rollout_buffer.put, rollouts._rollouts.generate_batch = put_for_one_who_waits, generate_batch
    begin(rollouts, model)
    assert begun.acquire(timeout=SECONDS)
    take(rollouts, 4)
    for _ in range(5):
        rollouts._loop.call(asyncio.sleep(0))
    assert not begun.acquire(blocking=False)
    take(rollouts, 1)
    assert begun.acquire(timeout=SECONDS)


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (1, 0), (4, 3)])
def test_a_batch_is_cut_so_that_it_may_age_by_a_version_in_the_queue(make: Any, theirs: int, ours: int) -> None:
    assert make(max_staleness=theirs)._config.rollout.max_staleness == ours


def test_prompts_come_again_with_numbers_of_their_own(make: Any, model: Any) -> None:
    rows = Rows([{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}])
    rollouts = make(rows=rows, reward_funcs=texts, **ONE_BATCH)
    begin(rollouts, model)
    samples = take(rollouts, 12)
    assert [sample.group_id for sample in samples] == [number for number in range(4) for _ in range(3)]
    assert {sample.prompt for sample in samples} == {"a", "b"}


def texts(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    return [float(isinstance(each, str)) for each in completions]


def only_odd(samples: list[Sample]) -> Keep | Drop:
    return Keep() if samples[0].group_index % 2 else Drop("even")


def odd_label(sample: Sample, prompt: Any) -> float:
    return float(prompt.label)


def test_filters_and_rewards_of_rollfeed(make: Any, model: Any) -> None:
    config = RolloutConfig(plugins=PluginSettings(reward=odd_label, group_filters=[only_odd]))
    rollouts = make(config=config, reward_funcs=(), label_key="label", **ONE_BATCH)
    begin(rollouts, model)
    samples = take(rollouts)
    assert [sample.group_id for sample in samples] == [1, 1, 1, 3, 3, 3]
    assert [sample.metrics["reward"] for sample in samples] == [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]
    assert [sample.advantage for sample in samples] == [0.0] * 6


def broken(**_: Any) -> list[float]:
    raise OSError("the judge is away")


def leaving(**_: Any) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(("function", "told"), [(broken, "the judge is away"), (leaving, "it raised SystemExit")])
def test_health_tells_why_no_sample_comes(make: Any, model: Any, function: Any, told: str) -> None:
    rollouts = make(reward_funcs=function)
    begin(rollouts, model)
    with pytest.raises(RunFailedError, match=rf"no more samples: .*{told}"):
        wait_for_a_sample(rollouts)


def wait_for_a_sample(rollouts: AsyncRollouts) -> None:
    """Wait as the trainer does."""
    for _ in range(int(SECONDS)):
        try:
            rollouts.rollout_buffer.get(timeout=1.0)
        except queue.Empty:
            rollouts.check_health(SECONDS)


def test_health_tells_that_nothing_happens(make: Any, model: Any) -> None:
    rollouts = make()
    begin(rollouts, model)
    rollouts.check_health(SECONDS)
    with pytest.raises(RunFailedError, match=r"no rollout has ended for \d+ s: see heartbeat_stale_after_s"):
        rollouts.check_health(-1.0)


def test_it_ends_more_than_once_and_needs_to_be_both(make: Any, model: Any) -> None:
    rollouts = make()
    with pytest.raises(ConfigError, match="give it as weight_transfer, too"):
        rollouts.start()
    begin(rollouts, model)
    rollouts.stop()
    rollouts.destroy()
    with pytest.raises(RunFailedError, match="the rollouts were stopped"):
        rollouts.check_health(SECONDS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"per_device_train_batch_size": 4},
            r"weight_sync_steps = 4 is no multiple of num_generations = 3: change one",
        ),
        ({"reward_funcs": ()}, "nothing scores it: give reward functions, or a config with reward.rm_type"),
        ({"config": RolloutConfig(reward=RewardSettings(rm_type="math"))}, "both score: leave one of them out"),
        ({"reward_funcs": [remainders, remainders]}, "two reward_funcs have one name, of remainders"),
        ({"min_p": 0.1}, "min_p = 0.1: rollfeed does not sample with it"),
    ],
)
def test_what_is_refused_before_anything_starts(make: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(**given)
