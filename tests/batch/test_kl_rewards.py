"""Advantages of rewards less the divergence from a reference, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfeed import testing
from rollfeed.batch import advantages_less_kl, batch_advantages
from rollfeed.config.advantage import AdvantageEstimator, AdvantageSettings
from rollfeed.errors import RunFailedError
from rollfeed.types import Group, Prompt, Rollout, Sample, TrainBatch


def sample_of(reward: Any, length: int = 2, **changes: Any) -> Sample:
    sample = testing.sample_of([1], list(range(2, 2 + length)), reward=reward)
    return replace(sample, **changes)


def batch_of(*groups: Sequence[Sequence[Sample]], penalties: Sequence[float] | None = None) -> TrainBatch:
    prompt = Prompt(prompt_id="a", source="made", text="", token_ids=np.array([1], np.int32))
    made = tuple(
        Group(number, prompt, tuple(Rollout(rollout_id=index, samples=tuple(each)) for index, each in enumerate(group)))
        for number, group in enumerate(groups)
    )
    count = sum(len(group.samples) for group in made)
    penalties_S = None if penalties is None else np.array(penalties, np.float32)
    return TrainBatch(
        step=0,
        policy_version=0,
        groups=made,
        advantages_S=np.zeros(count, np.float32),
        penalties_S=penalties_S,
        metrics={},
    )


def less_kl(batch: TrainBatch, taken: Sequence[Sequence[float]], estimator: str, **settings: Any) -> list[Any]:
    chosen = AdvantageSettings(estimator=AdvantageEstimator(estimator), **settings)
    rows = [np.array(each, np.float64) for each in taken]
    return [each.tolist() for each in advantages_less_kl(batch, rows, settings=chosen)]


# A right and a wrong answer of two tokens, whose divergences take 0.05 and 0.15, and 0.1 and -0.05.
TAKEN = [[0.05, 0.15], [0.10, -0.05]]


@pytest.mark.parametrize(
    ("estimator", "settings", "expected"),
    [
        ("group_mean", {}, 0.425),  # 0.8 and -0.05 with the mean 0.375
        ("group_mean", {"divide_by_std": True}, 0.425 / (0.85 / 2**0.5)),
        ("leave_one_out", {}, 0.85),
        ("reinforce_pp_baseline", {}, (3 / 4) ** 0.5),  # +-0.425 at four tokens
    ],
)
def test_what_compares_rollouts_has_their_sums(estimator: str, settings: dict[str, Any], expected: float) -> None:
    found = less_kl(batch_of([[sample_of(1.0)], [sample_of(0.0)]]), TAKEN, estimator, **settings)
    np.testing.assert_allclose(found, [expected, -expected], rtol=1e-5)


def test_reinforce_pp_has_the_return_from_each_token_on() -> None:
    found = less_kl(batch_of([[sample_of(1.0)], [sample_of(0.0)]]), TAKEN, "reinforce_pp")
    returns = np.array([[1 - 0.2, 1 - 0.15], [0 - 0.05, 0 + 0.05]])
    np.testing.assert_allclose(found, (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5)


def test_returns_are_whitened_over_trained_tokens() -> None:
    masked = sample_of(1.0, 3, loss_mask=np.array([1, 0, 1], np.float32))
    batch = batch_of([[masked], [sample_of(0.0, 1)]], [[sample_of(5.0, 2, remove_sample=True)]])
    found = less_kl(batch, [[0.1, 0.0, 0.3], [0.0], [0.0, 0.0]], "reinforce_pp")
    trained = np.array([1 - 0.4, 1 - 0.3, 0.0])
    np.testing.assert_allclose(
        [found[0][0], found[0][2], found[1][0]], (trained - trained.mean()) / trained.std(ddof=1), rtol=1e-5
    )
    assert [len(each) for each in found] == [3, 1, 2]


def test_without_a_divergence_advantages_are_those_of_the_rewards() -> None:
    batch = batch_of([[sample_of(1.0)], [sample_of(0.0, 5)]], [[sample_of(0.3, 1)], [sample_of(0.2)]])
    rows = [np.zeros(sample.response_length) for sample in batch.samples]
    for estimator in AdvantageEstimator:
        settings = AdvantageSettings(estimator=estimator)
        found = advantages_less_kl(batch, rows, settings=settings)
        expected = batch_advantages(batch.groups, settings=settings)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, np.broadcast_to(theirs, np.shape(ours)), rtol=1e-6)


def test_penalties_of_the_batch_count_once() -> None:
    batch = batch_of([[sample_of(1.0)], [sample_of(0.0)]], penalties=[-0.5, 0.0])
    assert less_kl(batch, TAKEN, "leave_one_out") == pytest.approx([0.35, -0.35])
    returns = np.array([[0.5 - 0.2, 0.5 - 0.15], [0 - 0.05, 0 + 0.05]])
    np.testing.assert_allclose(
        less_kl(batch, TAKEN, "reinforce_pp"), (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5
    )


def test_forks_of_a_rollout_lose_what_all_of_it_takes() -> None:
    forks = [sample_of(1.0), sample_of(1.0, 1)]
    found = less_kl(batch_of([forks, [sample_of(0.0)]]), [[0.1, 0.1], [0.3], [0.0, 0.0]], "leave_one_out")
    assert found == pytest.approx([0.5, 0.5, -0.5])


def test_samples_with_rewards_of_their_own_are_compared_by_these() -> None:
    # 1 and 0.5 with the mean 0.75, less 0.2; the other rollout has 0.
    own = [sample_of(1.0), sample_of(0.5)]
    found = less_kl(batch_of([own, [sample_of(0.0)]]), [[0.1, 0.0], [0.1, 0.0], [0.0, 0.0]], "group_mean")
    assert found == pytest.approx([0.275 + 0.25, 0.275 - 0.25, -0.275])


def test_rewards_by_name_keep_the_others() -> None:
    batch = batch_of([[sample_of({"score": 1.0, "other": 7.0})], [sample_of({"score": 0.0, "other": 3.0})]])
    found = advantages_less_kl(
        batch, [np.array(each) for each in TAKEN], settings=AdvantageSettings(), reward_key="score"
    )
    assert found.tolist() == pytest.approx([0.425, -0.425])
    assert batch.samples[0].reward == {"score": 1.0, "other": 7.0}


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_equal_rewards_and_divergences_teach_nothing(estimator: AdvantageEstimator) -> None:
    batch = batch_of([[sample_of(1.0)], [sample_of(1.0)]])
    assert not np.any(less_kl(batch, [[0.0, 0.0]] * 2, estimator.value))
    assert np.any(less_kl(batch, TAKEN, estimator.value))
    as_good_as_equal = batch_of([[sample_of(1.0)], [sample_of(1.0 + 1e-9)]])
    assert not np.any(less_kl(as_good_as_equal, [[0.0, 0.0]] * 2, estimator.value))


def test_advantages_that_no_float_holds_are_an_error() -> None:
    batch = batch_of([[sample_of(1.0)], [sample_of(0.0)]])
    with pytest.raises(RunFailedError, match="too large for float32"):
        less_kl(batch, [[1e200, 0.0], [0.0, 0.0]], "group_mean")
