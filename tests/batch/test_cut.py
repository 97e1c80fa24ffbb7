from functools import partial

import numpy as np
import pytest

from rollfeed.batch import batch_metrics, cut_batch, group_advantages
from rollfeed.errors import RunFailedError
from rollfeed.testing.contracts import check_advantage, make_group


def test_advantages_sum_to_zero_within_each_group() -> None:
    for rewards in ([0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0], [5.0]):
        for divide in (False, True):
            assert abs(group_advantages(np.array(rewards), divide_by_std=divide).sum()) < 1e-9


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
    return cut_batch(groups, step=3, policy_version=2, reward_key=None, advantage_fn=advantage_fn)


def test_a_batch_is_ordered_by_index_with_one_advantage_a_sample() -> None:
    batch = cut([make_group([0.0, 1.0], group_index=5), make_group([4.0, 0.0], group_index=2)])
    assert [group.group_index for group in batch.groups] == [2, 5]
    assert batch.advantages_S.tolist() == [2.0, -2.0, -0.5, 0.5]
    assert (batch.step, batch.policy_version) == (3, 2)


@pytest.mark.parametrize("wrong", [lambda rewards: rewards[:1], lambda rewards: rewards / 0.0])
def test_an_advantage_function_that_returns_nonsense_is_named(wrong) -> None:
    with np.errstate(all="ignore"), pytest.raises(RunFailedError, match="the advantage function returned"):
        cut([make_group([0.0, 1.0])], advantage_fn=wrong)


def test_metrics_of_a_batch() -> None:
    metrics = batch_metrics([make_group([0.0, 1.0]), make_group([1.0, 1.0])], reward_key=None, policy_version=4)
    assert metrics["rollout/reward_mean"] == 0.75
    assert metrics["rollout/group_reward_std"] == 0.25
    assert metrics["rollout/response_length_mean"] == 1.0
    assert metrics["rollout/truncated_ratio"] == 0.0
    assert metrics["rollout/staleness_max"] == 4.0
    assert "rollout/correct_ratio" not in metrics
