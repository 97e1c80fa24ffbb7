from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollfeed.batch import AgeLimit, batch_metrics, cut_batch, group_advantages
from rollfeed.config import StalenessPolicy
from rollfeed.errors import RunFailedError
from rollfeed.testing.contracts import check_advantage, make_group, make_sample
from rollfeed.types import Correct, Rollout, SampleStatus, Verdict, VersionSpan


def test_advantages_sum_to_zero_within_each_group() -> None:
    for rewards in ([0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [5.0]):
        for divide in (False, True):
            assert abs(group_advantages(np.array(rewards), divide_by_std=divide).sum()) < 1e-9


@pytest.mark.parametrize("divide", [False, True])
def test_equal_rewards_have_advantages_of_exactly_zero(divide: bool) -> None:
    assert not group_advantages(np.array([0.1, 0.1, 0.1]), divide_by_std=divide).any()


def test_advantages_are_what_the_papers_say() -> None:
    rewards_G = np.array([0.0, 1.0, 1.0, 2.0])
    np.testing.assert_allclose(group_advantages(rewards_G), [-1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(
        group_advantages(rewards_G, divide_by_std=True), np.array([-1.0, 0.0, 0.0, 1.0]) / np.sqrt(0.5), rtol=1e-5
    )


def test_advantage_functions_keep_their_contract() -> None:
    check_advantage(group_advantages)
    check_advantage(partial(group_advantages, divide_by_std=True))


def cut(groups, advantage_fn=group_advantages):
    rule = AgeLimit(max_staleness=None, policy=StalenessPolicy.REQUEUE)
    return cut_batch(groups, step=3, policy_version=2, age_rule=rule, reward_key=None, advantage_fn=advantage_fn).batch


def test_a_batch_is_ordered_by_index_with_one_advantage_a_sample() -> None:
    batch = cut([make_group([0.0, 1.0], group_index=5), make_group([4.0, 0.0], group_index=2)])
    assert [group.group_index for group in batch.groups] == [2, 5]
    assert batch.advantages_S.tolist() == [2.0, -2.0, -0.5, 0.5]
    assert (batch.step, batch.policy_version) == (3, 2)


@pytest.mark.parametrize("wrong", [lambda rewards: rewards[:1], lambda rewards: rewards / 0.0])
def test_an_advantage_function_that_returns_nonsense_is_named(wrong) -> None:
    with np.errstate(all="ignore"), pytest.raises(RunFailedError, match=r"plugins.advantage .* returned .* of group 0"):
        cut([make_group([0.0, 1.0])], advantage_fn=wrong)


def rollout_of(response: str, *, reward: float, status: SampleStatus, correct: Correct, **changes: Any) -> Rollout:
    sample = replace(make_sample(response, reward=reward), status=status, **changes)
    return Rollout(rollout_id=0, samples=(sample,), verdict=Verdict(reward=reward, correct=correct))


def test_every_number_of_a_batch() -> None:
    rollouts = (
        rollout_of("12", reward=0.0, status=SampleStatus.TRUNCATED, correct=Correct.NO),
        rollout_of("1234", reward=1.0, status=SampleStatus.COMPLETED, correct=Correct.YES),
        rollout_of("", reward=1.0, status=SampleStatus.ABORTED, correct=Correct.YES),
        rollout_of(
            "1234",
            reward=4.0,
            status=SampleStatus.COMPLETED,
            correct=Correct.UNDEFINED,
            version_spans=(VersionSpan(0, 1, 1), VersionSpan(1, 4, 3)),
            loss_mask=np.array([0.0, 1.0, 1.0, 0.5], np.float32),
            metadata={"start_rollout_id": 2},
        ),
    )
    group = replace(make_group([0.0, 1.0, 1.0, 4.0]), rollouts=rollouts)
    untrained = make_group([1.0, 1.0, 1.0, 1.0]).without_versions_before(1)
    assert batch_metrics([group, untrained], reward_key=None, policy_version=4)["rollout/groups_untrained"] == 1
    metrics = batch_metrics([group, make_group([1.0, 1.0, 1.0, 1.0])], reward_key=None, policy_version=4)
    assert metrics == {
        "rollout/reward_mean": 1.25,
        "rollout/reward_std": pytest.approx(np.std([0, 1, 1, 4, 1, 1, 1, 1])),
        "rollout/group_reward_std": pytest.approx(np.std([0, 1, 1, 4]) / 2),
        "rollout/response_length_mean": 14 / 8,
        "rollout/response_length_min": 0.0,
        "rollout/response_length_max": 4.0,
        "rollout/truncated_ratio": 1 / 8,
        "rollout/empty_ratio": 1 / 8,
        "rollout/groups_untrained": 0.0,
        "rollout/trained_tokens": 12.5,
        "rollout/staleness_max": 4.0,
        "rollout/staleness_mean": (6 * 4 + 1) / 7,  # an empty response has no age
        "rollout/several_versions_ratio": 1 / 8,
        "rollout/resumed_ratio": 1 / 8,
        "rollout/correct_ratio": 2 / 3,
    }


def test_a_batch_that_nobody_calls_right_or_wrong_has_no_share_of_right_answers() -> None:
    assert "rollout/correct_ratio" not in batch_metrics([make_group([0.0, 1.0])], reward_key=None, policy_version=0)


def forked(*rewards_of_rollouts, group_index: int = 0):
    """A group with a sample for each reward of each rollout."""
    plain = make_group([0.0] * len(rewards_of_rollouts), group_index=group_index)
    rollouts = [
        replace(rollout, samples=tuple(replace(rollout.samples[0], reward=reward) for reward in rewards))
        for rollout, rewards in zip(plain.rollouts, rewards_of_rollouts, strict=True)
    ]
    return replace(plain, rollouts=tuple(rollouts))


def test_a_samples_advantage_is_of_its_own_reward_and_the_baseline_is_over_rollouts() -> None:
    batch = cut([forked([0.2, 0.9, 0.4], [0.0], [1.0, 1.0])])
    np.testing.assert_allclose(batch.advantages_S, [-0.3, 0.4, -0.1, -0.5, 0.5, 0.5], rtol=1e-6)


def test_the_deviation_that_advantages_are_divided_by_is_over_rollouts() -> None:
    batch = cut([forked([0.2, 0.8], [0.0], [1.0])], partial(group_advantages, divide_by_std=True))
    expected = np.array([-0.3, 0.3, -0.5, 0.5]) / np.std([0.5, 0.0, 1.0])
    np.testing.assert_allclose(batch.advantages_S, expected, rtol=1e-5)


def test_samples_that_differ_in_rollouts_that_do_not_are_compared_without_a_deviation() -> None:
    for divide in (False, True):
        batch = cut([forked([0.2, 0.8], [0.5])], partial(group_advantages, divide_by_std=divide))
        np.testing.assert_allclose(batch.advantages_S, [-0.3, 0.3, 0.0], atol=1e-6)


def test_an_advantage_function_sees_rollouts_and_its_scale_counts_for_samples() -> None:
    seen = []

    def doubled(rewards_G):
        seen.append(rewards_G.tolist())
        return 2.0 * rewards_G

    batch = cut([forked([0.25, 0.75], [0.0], [1.0])], doubled)
    assert seen == [[0.5, 0.0, 1.0]]
    np.testing.assert_allclose(batch.advantages_S, [0.5, 1.5, 0.0, 2.0], rtol=1e-6)


def test_forks_that_share_a_reward_share_an_advantage_whatever_its_size() -> None:
    batch = cut([forked([1e100, 1e100], [-1e100])], lambda rewards_G: np.sign(rewards_G))
    assert batch.advantages_S.tolist() == [1.0, 1.0, -1.0]


def test_metrics_read_the_rewards_of_rollouts() -> None:
    metrics = batch_metrics([forked([0.0, 0.0, 1.5], [1.0])], reward_key=None, policy_version=0)
    assert metrics["rollout/reward_mean"] == 0.75
    assert metrics["rollout/group_reward_std"] == metrics["rollout/reward_std"] == 0.25
