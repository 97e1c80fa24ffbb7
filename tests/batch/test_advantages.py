"""Advantages against the definitions of papers and peers, written again here rollout by rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.batch import batch_advantages, group_mean_advantages, leave_one_out_advantages
from rollfeed.config import AdvantageSettings
from rollfeed.config.advantage import AdvantageEstimator
from rollfeed.errors import ConfigError, RewardError, RunFailedError
from rollfeed.testing import make_group, make_sample
from rollfeed.types import Group, Rollout

GROUP_MEAN = AdvantageSettings()
GRPO = AdvantageSettings(divide_by_std=True)
RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE = (
    AdvantageSettings(estimator=name) for name in ("leave_one_out", "reinforce_pp", "reinforce_pp_baseline")
)
EVERY = [GROUP_MEAN, GRPO, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE]
COMPARED = [GROUP_MEAN, GRPO, RLOO, REINFORCE_PP_BASELINE]
"""What compares with a group."""


def advantages_of(*groups: Group, settings: AdvantageSettings, **arguments) -> list[float]:
    return batch_advantages(groups, settings=settings, **arguments).tolist()


def group_of(*rollouts: list[float], lengths: list[int] | None = None, masks=None) -> Group:
    """Return a group of rollouts, each the rewards of its samples; every sample of a rollout has its length."""
    plain = make_group([0.0] * len(rollouts))
    made = []
    for number, (rollout, rewards) in enumerate(zip(plain.rollouts, rollouts, strict=True)):
        sample = make_sample("x" * (lengths[number] if lengths else 1), member=number)
        if masks is not None:
            sample = replace(sample, loss_mask=np.array(masks[number], np.float32))
        made.append(Rollout(rollout_id=rollout.rollout_id, samples=tuple(replace(sample, reward=r) for r in rewards)))
    return replace(plain, rollouts=tuple(made))


def test_advantages_are_what_the_papers_and_peers_say() -> None:
    group = make_group([0.0, 1.0, 1.0, 2.0])
    assert advantages_of(group, settings=GROUP_MEAN) == [-1, 0, 0, 1]
    # The deviation is that of a sample, with n - 1, as verl, slime and TRL have it.
    np.testing.assert_allclose(advantages_of(group, settings=GRPO), np.array([-1, 0, 0, 1]) / np.sqrt(2 / 3), rtol=1e-5)
    np.testing.assert_allclose(advantages_of(group, settings=RLOO), [-4 / 3, 0, 0, 4 / 3], rtol=1e-6)


@pytest.mark.parametrize(("size", "expected"), [(2, 0.70710678), (4, 0.8660254), (8, 0.93541435), (16, 0.96824584)])
def test_the_deviation_of_half_right_groups_of_every_size_is_with_n_minus_1(size: int, expected: float) -> None:
    advantages = advantages_of(make_group([0.0, 1.0] * (size // 2)), settings=GRPO)
    np.testing.assert_allclose(advantages, [-expected, expected] * (size // 2), rtol=3e-6)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9).map(np.array))
def test_leave_one_out_is_each_reward_minus_the_mean_of_the_others(rewards) -> None:
    others = [np.delete(rewards, i).mean() if len(rewards) > 1 else rewards[i] for i in range(len(rewards))]
    np.testing.assert_allclose(leave_one_out_advantages(rewards), rewards - others, atol=1e-5)
    assert abs(group_mean_advantages(rewards).sum()) < 1e-6


@pytest.mark.parametrize("settings", COMPARED)
@pytest.mark.parametrize("reward", [0.1, 3.0, -7.3, 1e9])
def test_groups_of_one_and_of_equal_rewards_have_advantages_of_exactly_zero(settings, reward: float) -> None:
    other = make_group([0.0, 1.0], group_index=2)
    groups = [make_group([reward]), make_group([reward] * 7, group_index=1), other]
    advantages = advantages_of(*groups, settings=settings)
    assert advantages[:8] == [0.0] * 8
    assert all(advantages[8:])


@pytest.mark.parametrize("settings", EVERY)
def test_a_batch_of_equal_rewards_or_one_rollout_or_nothing_is_zero(settings) -> None:
    assert advantages_of(make_group([0.7] * 3), make_group([0.7] * 2), settings=settings) == [0.0] * 5
    assert advantages_of(make_group([5.0]), settings=settings) == [0.0]
    assert advantages_of(settings=settings) == []


def test_reinforce_pp_whitens_over_trained_tokens() -> None:
    """Right answers of 100 tokens and wrong ones of 1,000: +3.16 and -0.32, the mean over tokens is 0."""
    right, wrong = advantages_of(group_of([1.0], [0.0], lengths=[100, 1000]), settings=REINFORCE_PP)
    assert (right, wrong) == (pytest.approx(3.16, abs=0.01), pytest.approx(-0.32, abs=0.01))
    tokens = np.repeat([right, wrong], [100, 1000])
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("settings", [REINFORCE_PP, REINFORCE_PP_BASELINE])
def test_what_is_not_trained_on_does_not_count_in_the_whitening(settings) -> None:
    plain = group_of([1.0], [0.0], [0.0], lengths=[2, 3, 4])
    masked = group_of([1.0], [0.0], [0.0], lengths=[4, 3, 4], masks=[[0, 1, 0, 1], [1] * 3, [1] * 4])
    assert advantages_of(masked, settings=settings) == advantages_of(plain, settings=settings)
    removed = replace(
        plain,
        rollouts=(
            *plain.rollouts[:2],
            replace(plain.rollouts[2], samples=(replace(plain.rollouts[2].samples[0], remove_sample=True),)),
        ),
    )
    values = np.array([1.0, 0.0, 0.0]) - (1 / 3 if settings is REINFORCE_PP_BASELINE else 0.0)
    tokens = np.repeat(values[:2], [2, 3])
    expected = (values - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(advantages_of(removed, settings=settings), expected, rtol=1e-5)


def test_reinforce_pp_with_baseline_whitens_what_is_above_the_groups_mean() -> None:
    groups = [
        group_of([0.0], [1.0], lengths=[2, 5]),
        group_of([3.0], [3.0], [6.0], lengths=[1, 4, 3]),
        group_of([2.0], [2.0], lengths=[2, 2]),
        group_of([9.0], lengths=[50]),
    ]
    above = np.array([-0.5, 0.5, -1, -1, 2, 0, 0])
    tokens = np.repeat(above, [2, 5, 1, 4, 3, 2, 2])
    expected = (above - tokens.mean()) / tokens.std(ddof=1)
    expected[5:] = 0.0  # equal rewards teach nothing, whatever the mean of the batch is
    advantages = advantages_of(*groups, settings=REINFORCE_PP_BASELINE)
    np.testing.assert_allclose(advantages[:7], expected, rtol=1e-5)
    assert advantages[5:] == [0.0] * 3


@pytest.mark.parametrize("settings", [GROUP_MEAN, GRPO, RLOO])
def test_a_fork_neither_moves_the_mean_nor_counts_twice(settings) -> None:
    plain = advantages_of(group_of([1.0], [0.0], [0.0]), settings=settings)
    forked = advantages_of(group_of([1.0] * 3, [0.0], [0.0]), settings=settings)
    assert forked == [plain[0]] * 3 + plain[1:]
    assert plain[0] > 0


def test_groups_are_never_mixed() -> None:
    groups = [make_group([0.0, 1.0]), make_group([10.0, 30.0]), make_group([7.0])]
    assert advantages_of(*groups, settings=GROUP_MEAN) == [-0.5, 0.5, -10, 10, 0]
    assert advantages_of(*groups, settings=RLOO) == [-1, 1, -20, 20, 0]


def test_samples_are_credited_by_their_own_reward_against_their_rollouts() -> None:
    groups = [group_of([0.2, 0.8], [0.0], [1.0]), group_of([1.0], [3.0], [2.0])]
    own = np.array([0.2, 0.8, 0.0, 1.0, 1.0, 3.0, 2.0])
    above = own - np.array([0.5] * 4 + [2.0] * 3)
    others = np.array([0.5, 0.5, 0.75, 0.25, 2.5, 1.5, 2.0])
    deviations = np.repeat([np.std([0.5, 0.0, 1.0], ddof=1), 1.0], [4, 3])
    for settings, expected in (
        (GROUP_MEAN, above),
        (GRPO, above / deviations),
        (RLOO, own - others),
        (REINFORCE_PP, (own - own.mean()) / own.std(ddof=1)),
        (REINFORCE_PP_BASELINE, (above - above.mean()) / above.std(ddof=1)),
    ):
        np.testing.assert_allclose(advantages_of(*groups, settings=settings), expected, rtol=1e-5, atol=1e-6)


def test_a_missing_reward_is_an_error() -> None:
    with pytest.raises(RewardError, match="no reward"):
        advantages_of(group_of([1.0], [None]), settings=GROUP_MEAN)


def test_rewards_of_every_size_are_compared_or_refused() -> None:
    for settings in (GRPO, REINFORCE_PP, REINFORCE_PP_BASELINE):
        advantages = advantages_of(make_group([1e200, -1e200]), settings=settings)
        np.testing.assert_allclose(advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-5)
    with pytest.raises(RunFailedError, match="rewards are too far apart; scale them down"):
        advantages_of(make_group([1e200, -1e200]), settings=GROUP_MEAN)


def test_a_division_that_an_estimator_does_not_have_is_refused() -> None:
    for estimator in set(AdvantageEstimator) - {AdvantageEstimator.GROUP_MEAN}:
        with pytest.raises(ValueError, match="divide_by_std = true has no effect with estimator"):
            AdvantageSettings(estimator=estimator, divide_by_std=True)


def of_function(*groups: Group, function):
    return batch_advantages(groups, settings=GROUP_MEAN, function=function)


def test_a_function_may_return_one_advantage_a_token() -> None:
    def ramp(rewards_G, *, group):
        return [np.arange(s.response_length) * r for r, s in zip(rewards_G, group.samples, strict=True)]

    first, second = group_of([1.0], [2.0], lengths=[3, 2]), group_of([-1.0], [1.0], lengths=[2, 2])
    advantages = of_function(first, second, function=ramp)
    assert [each.tolist() for each in advantages] == [[0, 1, 2], [0, 2], [0, -1], [0, 1]]
    assert all(each.dtype == np.float32 for each in advantages)


def test_a_function_may_return_one_advantage_a_sample() -> None:
    group = group_of([0.5, 0.5], [0.0])
    assert of_function(group, function=lambda rewards_G, *, group: [1, 2, 3]).tolist() == [1, 2, 3]


def test_numbers_are_spread_over_tokens_where_another_group_has_one_a_token() -> None:
    def mixed(rewards_G, *, group):
        return [[1.0, 2.0], [3.0]] if group.group_index else [5.0, 6.0]

    first, second = group_of([0.0], [1.0], lengths=[2, 3]), group_of([0.0], [1.0], lengths=[2, 1])
    advantages = of_function(first, replace(second, group_index=1), function=mixed)
    assert [each.tolist() for each in advantages] == [[5, 5], [6, 6, 6], [1, 2], [3]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rewards_G, *, group: rewards_G[:1],
        lambda rewards_G, *, group: rewards_G / 0.0,
        lambda rewards_G, *, group: [[1.0, 2.0], [3.0, 4.0]],
        lambda rewards_G, *, group: [[1.0, 2.0, 3.0], [3.0, np.nan]],
        lambda rewards_G, *, group: [[1.0, 2.0, 3.0]],
        lambda rewards_G, *, group: 1e300 * rewards_G + 1e300,
    ],
)
def test_a_function_that_returns_nonsense_is_named(wrong) -> None:
    with np.errstate(all="ignore"), pytest.raises(RunFailedError, match=r"plugins.advantage .* returned .* of group 0"):
        of_function(group_of([0.0], [1.0], lengths=[3, 2]), function=wrong)


def test_a_function_that_raises_or_returns_no_list_is_named() -> None:
    for wrong in (lambda rewards_G, *, group: None, lambda rewards_G, *, group: [[1.0], 2.0]):
        with pytest.raises(RunFailedError, match=r"plugins\.advantage"):
            of_function(make_group([0.0, 1.0]), function=wrong)


def test_a_function_beside_an_estimator_is_refused() -> None:
    from rollfeed.config import validate_settings

    tables = {
        "prompts": {"environments": [{"id": "core/copy_text"}]},
        "plugins": {"advantage": "mine:advantage"},
        "advantage": {"estimator": "leave_one_out"},
    }
    with pytest.raises(ConfigError, match=r"plugins\.advantage = 'mine:advantage' replaces \[advantage\]: remove one"):
        validate_settings(tables, where="test")
    del tables["advantage"]
    validate_settings(tables, where="test")
