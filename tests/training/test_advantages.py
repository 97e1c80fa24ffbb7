from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.config.train import AdvantageEstimator
from rollfeed.errors import RewardError
from rollfeed.testing.contracts import check_advantage
from rollfeed.training import (
    batch_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
    reinforce_pp_advantages,
)

PER_GROUP = [group_mean_advantages, partial(group_mean_advantages, divide_by_std=True), leave_one_out_advantages]
REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9).map(np.array)


def test_advantages_are_what_the_papers_say() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 2.0])
    np.testing.assert_allclose(group_mean_advantages(rewards), [-1, 0, 0, 1])
    expected = np.array([-1, 0, 0, 1]) / np.sqrt(0.5)
    np.testing.assert_allclose(group_mean_advantages(rewards, divide_by_std=True), expected, rtol=1e-5)
    np.testing.assert_allclose(leave_one_out_advantages(rewards), [-4 / 3, 0, 0, 4 / 3])


@given(REWARDS)
def test_leave_one_out_is_each_reward_minus_the_mean_of_the_others(rewards) -> None:
    others = [np.delete(rewards, i).mean() if len(rewards) > 1 else rewards[i] for i in range(len(rewards))]
    np.testing.assert_allclose(leave_one_out_advantages(rewards), rewards - others, atol=1e-5)


@pytest.mark.parametrize("function", PER_GROUP)
def test_advantage_functions_keep_their_contract(function) -> None:
    check_advantage(function)


@pytest.mark.parametrize("function", PER_GROUP)
def test_groups_of_one_and_of_equal_rewards_have_advantage_zero(function) -> None:
    assert function(np.array([3.0])).tolist() == [0.0]
    equal = np.array([0.1] * 8, np.float32)
    assert function(equal).tolist() == [0.0] * 8


def test_reinforce_pp_normalises_over_the_batch() -> None:
    groups = [np.array([0.0, 1.0]), np.array([3.0, 3.0, 5.0])]
    every = np.concatenate(groups)
    expected = (every - every.mean()) / every.std()
    np.testing.assert_allclose(
        np.concatenate(reinforce_pp_advantages(groups, group_baseline=False)), expected, rtol=1e-5
    )


def test_reinforce_pp_with_baseline_subtracts_the_groups_mean_first() -> None:
    groups = [np.array([0.0, 1.0]), np.array([3.0, 3.0, 6.0]), np.array([9.0])]
    centred = np.array([-0.5, 0.5, -1, -1, 2])
    advantages = reinforce_pp_advantages(groups, group_baseline=True)
    np.testing.assert_allclose(np.concatenate(advantages[:2]), centred / centred.std(), rtol=1e-5)
    assert advantages[2].tolist() == [0.0]


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_pp_of_equal_rewards_or_one_rollout_is_zero(group_baseline: bool) -> None:
    for groups in ([np.array([0.7] * 3), np.array([0.7] * 2)], [np.array([5.0])]):
        advantages = reinforce_pp_advantages(groups, group_baseline=group_baseline)
        assert np.concatenate(advantages).tolist() == [0.0] * sum(map(len, groups))
    assert reinforce_pp_advantages([], group_baseline=group_baseline) == []


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_a_fork_neither_moves_the_mean_nor_counts_twice(estimator, sample_of, group_of) -> None:
    def group(num_forks: int):
        rewards = [1.0, 0.0, 0.0]
        members = [
            [sample_of([1], [2], rollout_id=r, reward=reward) for _ in range(num_forks if r == 0 else 1)]
            for r, reward in enumerate(rewards)
        ]
        return group_of(0, members)

    plain = batch_advantages([group(1)], estimator=estimator)
    forked = batch_advantages([group(3)], estimator=estimator)
    assert forked.tolist() == [plain[0]] * 3 + plain[1:].tolist()
    assert plain[0] > 0
    assert forked.dtype == np.float32


def test_groups_are_never_mixed(sample_of, group_of) -> None:
    first = group_of(0, [[sample_of([1], [2], reward=reward)] for reward in (0.0, 1.0)])
    second = group_of(1, [[sample_of([1], [2], reward=reward)] for reward in (10.0, 30.0)])
    single = group_of(2, [[sample_of([1], [2], reward=7.0)]])
    for estimator, expected in (
        (AdvantageEstimator.GROUP_MEAN, [-0.5, 0.5, -10, 10, 0]),
        (AdvantageEstimator.LEAVE_ONE_OUT, [-1, 1, -20, 20, 0]),
    ):
        assert batch_advantages([first, second, single], estimator=estimator).tolist() == expected


def test_division_by_the_deviation_is_asked_for(sample_of, group_of) -> None:
    group = group_of(0, [[sample_of([1], [2], reward=reward)] for reward in (0.0, 4.0)])
    divided = batch_advantages([group], estimator=AdvantageEstimator.GROUP_MEAN, divide_by_std=True)
    np.testing.assert_allclose(divided, [-1, 1], rtol=1e-5)


def test_a_missing_reward_is_an_error(sample_of, group_of) -> None:
    group = group_of(0, [[sample_of([1], [2], reward=1.0)], [sample_of([1], [2], reward=None)]])
    with pytest.raises(RewardError, match="no reward"):
        batch_advantages([group], estimator=AdvantageEstimator.GROUP_MEAN)


def test_samples_are_credited_by_their_own_reward_against_their_rollouts(sample_of, group_of) -> None:
    def samples(*rewards):
        return [sample_of([1], [2], reward=reward) for reward in rewards]

    groups = [
        group_of(0, [samples(0.2, 0.8), samples(0.0), samples(1.0)]),
        group_of(1, [samples(1.0), samples(3.0), samples(2.0)]),
    ]
    rollouts_N = np.array([0.5, 0.0, 1.0, 1.0, 3.0, 2.0])
    own_S = np.array([0.2, 0.8, 0.0, 1.0, 1.0, 3.0, 2.0])
    means_S = np.array([0.5] * 4 + [2.0] * 3)
    centred_N = rollouts_N - np.repeat([0.5, 2.0], 3)
    others_S = np.array([0.5, 0.5, 0.75, 0.25, 2.5, 1.5, 2.0])
    for estimator, expected_S in (
        (AdvantageEstimator.GROUP_MEAN, own_S - means_S),
        (AdvantageEstimator.LEAVE_ONE_OUT, own_S - others_S),
        (AdvantageEstimator.REINFORCE_PP, (own_S - rollouts_N.mean()) / rollouts_N.std()),
        (AdvantageEstimator.REINFORCE_PP_BASELINE, (own_S - means_S) / centred_N.std()),
    ):
        np.testing.assert_allclose(batch_advantages(groups, estimator=estimator), expected_S, rtol=1e-5, atol=1e-6)
    divided = batch_advantages(groups[:1], estimator=AdvantageEstimator.GROUP_MEAN, divide_by_std=True)
    np.testing.assert_allclose(divided, (own_S - means_S)[:4] / np.std([0.5, 0.0, 1.0]), rtol=1e-5)
