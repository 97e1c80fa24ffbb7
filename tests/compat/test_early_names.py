"""Programs that were written with an early rollout library: their checks, settings and manager give our batches."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rollfeed
from rollfeed.compat.early_names import (
    AsyncRolloutManager,
    RolloutConfig,
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    keep_if,
)
from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.config import FiltersSettings
from rollfeed.errors import ConfigError, RewardError, RunFailedError
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine, sample_of
from rollfeed.types import Drop, Keep, Sample, SampleStatus

TEXTS = [f"prompt {number}" for number in range(10)]


def group(rewards: Iterable[Any], **changes: Any) -> list[Sample]:
    return [
        sample_of(
            [1], [65 + number] * 12, index=number, rollout_id=number, response=str(number), reward=reward, **changes
        )
        for number, reward in enumerate(rewards)
    ]


def digit(sample: Any) -> float:
    return float(int(sample.response[0]) > 4)


@pytest.mark.parametrize(
    ("check", "kept", "dropped"),
    [
        (check_reward_nonzero_std, group([0.0, 1.0]), group([0.1] * 8)),
        (check_min_reward, group([0.0, 0.6]), group([0.0, 0.5])),
        (lambda s: check_min_reward(s, threshold=0.8), group([0.9]), group([0.8])),
        (check_response_diversity, group([1.0] * 2), [*group([1.0]), *group([1.0, 1.0, 1.0])[1:]] * 3),
        (check_reasonable_length, group([1.0]), [sample_of([1], [65] * 9)]),
        (lambda s: check_reasonable_length(s, max_tokens=12), group([1.0]), [sample_of([1], [65] * 13)]),
        (check_any_success, group([1.0]), group([1.0], status=SampleStatus.TRUNCATED)),
        (check_quality_and_diversity, group([0.0, 1.0]), group([1.0, 1.0])),
        (check_quality_and_diversity, group([0.0, 1.0]), group([0.0, 1.0, 1.0])[:1] * 5),
    ],
)
def test_a_check_says_true_of_groups_that_are_kept(
    check: Callable[..., bool], kept: list[Sample], dropped: list[Sample]
) -> None:
    renumbered = [
        SimpleNamespace(
            reward=each.reward, response=each.response, response_length=each.response_length, status=each.status
        )
        for each in dropped
    ]
    assert check(kept) is True
    assert check(renumbered) is False


def test_a_rollout_that_has_forked_counts_once() -> None:
    forked = [*group([1.0]), *group([0.0])]
    assert check_reward_nonzero_std(forked) is False
    assert check_response_diversity(forked, min_unique_ratio=1.0) is True


def test_samples_that_name_no_rollout_are_one_each() -> None:
    assert check_reward_nonzero_std([SlimeSample(reward=0.0), SlimeSample(reward=1.0)]) is True


@pytest.mark.parametrize("reward", [None, {"score": 1.0}])
def test_a_reward_that_is_no_number_is_refused(reward: Any) -> None:
    with pytest.raises(RewardError, match="a number is needed"):
        check_min_reward(group([reward]))


def told(batches: list[Any]) -> list[Any]:
    return [
        (s.token_ids.tolist(), s.logprobs.tolist(), s.reward, s.index, s.status, float(advantage))
        for batch in batches
        for s, advantage in zip(batch.samples, batch.advantages_S, strict=True)
    ]


def source() -> ListSource:
    return ListSource(TEXTS, repeat=True)


async def native() -> list[Any]:
    config = rollfeed.RolloutConfig(
        seed=5,
        rollout=rollfeed.RolloutSettings(
            rollout_batch_size=3, n_samples_per_prompt=4, over_sampling_factor=1.5, deterministic=True
        ),
        plugins=rollfeed.PluginSettings(reward=lambda sample, prompt: digit(sample)),
        filters=FiltersSettings(dynamic_sampling=[{"name": "reward_std"}]),
    )
    engine = ScriptedEngine()
    async with rollfeed.open_rollouts(config, source=source(), engine=engine, tokenizer=CharTokenizer()) as rollouts:
        return [await rollouts.generate_batch() for _ in range(3)]


async def by_default(request: Any, *, services: Any) -> Any:
    return await services.default(request, services=services)


@pytest.mark.parametrize("generate_fn", [None, by_default])
@pytest.mark.parametrize("swapped", [False, True])
async def test_the_manager_makes_the_batches_of_native_settings(generate_fn: Any, swapped: bool) -> None:
    config = RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=4,
        over_sampling_factor=1.5,
        generate_fn=generate_fn,
        reward_fn=digit,
        filter_fn=check_reward_nonzero_std,
    )
    order = (source(), config) if swapped else (config, source())
    manager = AsyncRolloutManager(
        *order,
        engine=ScriptedEngine(),
        tokenizer=CharTokenizer(),
        settings=rollfeed.RolloutConfig(seed=5, rollout=rollfeed.RolloutSettings(deterministic=True)),
    )
    batches = [await manager.generate_batch() for _ in range(3)]
    await manager.close()
    assert told(batches) == told(await native())
    assert sum(batch.metrics["rollout/groups_dropped"] for batch in batches) > 0


@pytest.mark.parametrize(("factor", "num_begun"), [(1.0, 3), (1.5, 5)])
async def test_so_many_prompts_are_begun_at_once(factor: float, num_begun: int) -> None:
    engine = ScriptedEngine()
    config = RolloutConfig(batch_size=3, n_samples_per_prompt=2, over_sampling_factor=factor, reward_fn=digit)
    async with AsyncRolloutManager(config, source(), engine=engine, tokenizer=CharTokenizer()) as manager:
        await manager.generate_batch()
    assert len(engine.requests) == 2 * num_begun


class Buffer:
    """A buffer as the library had it."""

    def __init__(self, prompts: list[Any]) -> None:
        self.prompts, self.position = prompts, 0

    def get_prompts(self, count: int) -> list[Any]:
        self.position += count
        return [self.prompts[number % len(self.prompts)] for number in range(self.position - count, self.position)]


class Status:
    def __init__(self, value: str) -> None:
        self.value = value


def early_sample(prompt: str, answer: list[int], **changes: Any) -> Any:
    """Return a sample whose mask is as long as its tokens."""
    fields = {
        "tokens": [7, 7, *answer],
        "loss_mask": [0.0, 0.0, *[1.0] * len(answer)],
        "rollout_log_probs": [-0.5] * len(answer),
        "response": f"{prompt}!",
        "reward": 0.25,
        "metadata": {"used_tools": 1},
        "status": Status("pending"),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("reward_fn", [None, lambda sample: 0.75])
async def test_a_generate_function_may_ask_an_engine_of_its_own(is_async: bool, reward_fn: Any) -> None:
    asked: list[Any] = []

    def generate(prompts: list[Any]) -> list[Any]:
        asked.extend(prompts)
        return [early_sample(each["prompt"], [8, 9]) for each in prompts]

    async def generate_async(prompts: list[Any]) -> list[Any]:
        return generate(prompts)

    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=2, generate_fn=generate_async if is_async else generate, reward_fn=reward_fn
    )
    async with AsyncRolloutManager(config, Buffer([{"prompt": "a"}, {"prompt": "b"}])) as manager:
        batch = await manager.generate_batch()
    assert sorted(each["prompt"] for each in asked) == ["a", "a", "b", "b"]
    assert [sample.response for sample in batch.samples] == ["a!", "a!", "b!", "b!"]
    for sample in batch.samples:
        assert (sample.token_ids.tolist(), sample.response_length) == ([7, 7, 8, 9], 2)
        np.testing.assert_allclose(sample.logprobs, -0.5)
        assert sample.reward == (0.25 if reward_fn is None else 0.75)
        assert sample.metadata["used_tools"] == 1
        assert sample.status is SampleStatus.COMPLETED


async def test_a_generate_function_may_return_samples_of_ours() -> None:
    def generate(prompts: list[str]) -> list[Sample]:
        ids = CharTokenizer().encode(prompts[0], add_special_tokens=False)
        return [sample_of(ids, [65, 66], reward=1.0)]

    manager = AsyncRolloutManager(
        RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate),
        Buffer(TEXTS),
        engine=ScriptedEngine(),
        tokenizer=CharTokenizer(),
    )
    async with manager:
        batch = await manager.generate_batch()
    assert [sample.index for sample in batch.samples] == [0, 1, 2, 3]
    assert not any("own_context" in sample.metadata for sample in batch.samples)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0: must be at least 1"),
        ({"batch_size": 1, "over_sampling_factor": 0.5}, "over_sampling_factor = 0.5: must be at least 1"),
        ({"batch_size": 2.5}, "batch_size = 2.5: must be at least 1, and a whole number"),
        ({"batch_size": 1, "n_samples_per_prompt": "4"}, "n_samples_per_prompt = '4': must be at least 1"),
        ({"batch_size": 1, "over_sampling_factor": "2"}, "over_sampling_factor = '2': must be at least 1"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(**sizes)


@pytest.mark.parametrize(
    ("config", "buffer", "message"),
    [
        (RolloutConfig(batch_size=1), source(), "give engine and tokenizer together"),
        (
            RolloutConfig(batch_size=1, generate_fn=lambda prompts: []),
            [],
            r"data_buffer is a list: it needs get_prompts",
        ),
        ({"batch_size": 1}, source(), r"config is a dict: give RolloutConfig"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(config: Any, buffer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsyncRolloutManager(config, buffer)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned None; it must return a list of samples"),
        ([early_sample("a", [8], rollout_log_probs=None)], "without rollout_log_probs"),
    ],
)
async def test_what_cannot_be_trained_on_ends_the_run(made: Any, message: str) -> None:
    manager = AsyncRolloutManager(
        RolloutConfig(batch_size=1, generate_fn=lambda prompts: made),
        Buffer(["a"]),
        settings=rollfeed.RolloutConfig(rollout=rollfeed.RolloutSettings(failure_minimum=1, failure_budget=0.0)),
    )
    async with manager:
        with pytest.raises(RunFailedError, match=message):
            await manager.generate_batch()


@pytest.mark.parametrize("generate_fn", [None, by_default])
async def test_a_prompt_that_is_no_text_needs_a_function_that_takes_it(generate_fn: Any) -> None:
    engine = ScriptedEngine()
    config = RolloutConfig(batch_size=1, generate_fn=generate_fn, reward_fn=digit)
    async with AsyncRolloutManager(
        config, Buffer([{"prompt": "a"}]), engine=engine, tokenizer=CharTokenizer()
    ) as manager:
        with pytest.raises(
            RunFailedError, match=r"data_buffer .*gave \{'prompt': 'a'\}; .*a text, or a list of messages"
        ):
            await manager.generate_batch()
    assert engine.requests == []


def test_a_check_is_a_group_filter_of_settings() -> None:
    keep = keep_if(check_min_reward)
    assert keep(group([1.0])) == Keep()
    assert keep(group([0.0])) == Drop("check_min_reward")
    with pytest.raises(RunFailedError, match=r"returned 'yes'; it must return True \(keep\)"):
        keep_if(lambda samples: "yes")(group([0.0]))
