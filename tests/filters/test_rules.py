from __future__ import annotations

import pytest

from rollfeed.errors import ConfigError, RewardError
from rollfeed.filters import (
    AllCorrect,
    AllWrong,
    AnySuccess,
    AtLeastHalfCorrect,
    CompleteGroup,
    MinimumReward,
    QualityAndDiversity,
    ResponseDiversity,
    ResponseLength,
    RewardStd,
    TruncatedFraction,
)
from rollfeed.types import Correct, Drop, Keep, SampleStatus

COMPLETED, TRUNCATED = SampleStatus.COMPLETED, SampleStatus.TRUNCATED


@pytest.mark.parametrize("status", [SampleStatus.ABORTED, SampleStatus.FAILED, SampleStatus.PENDING])
def test_complete_group_drops_a_member_that_did_not_end(make_sample, status) -> None:
    group = [make_sample(0), make_sample(1, status=status, reward=None)]
    assert CompleteGroup(n_samples_per_prompt=2)(group) == Drop("incomplete")


def test_complete_group_keeps_truncated_members(make_sample) -> None:
    assert CompleteGroup(n_samples_per_prompt=2)([make_sample(0), make_sample(1, status=TRUNCATED)]) == Keep()


def test_any_success_needs_one_completed_member(make_sample) -> None:
    rule = AnySuccess(n_samples_per_prompt=2)
    assert rule([make_sample(0, status=TRUNCATED), make_sample(1, status=TRUNCATED)]) == Drop("no_success")
    assert rule([make_sample(0, status=TRUNCATED), make_sample(1)]) == Keep()


def test_truncated_fraction_keeps_exactly_the_maximum(make_sample) -> None:
    group = [make_sample(i, status=TRUNCATED if i < 29 else COMPLETED) for i in range(100)]
    assert TruncatedFraction(n_samples_per_prompt=100, maximum=0.29)(group) == Keep()
    assert TruncatedFraction(n_samples_per_prompt=100, maximum=0.28)(group) == Drop("truncated")


def test_response_length_holds_for_every_member(make_sample) -> None:
    rule = ResponseLength(n_samples_per_prompt=2, minimum=2, maximum=5)
    assert rule([make_sample(0, length=2), make_sample(1, length=5)]) == Keep()
    assert rule([make_sample(0, length=1), make_sample(1, length=5)]) == Drop("too_short")
    assert rule([make_sample(0, length=2), make_sample(1, length=6)]) == Drop("too_long")


def test_response_length_drops_empty_responses_by_default(make_sample) -> None:
    assert ResponseLength(n_samples_per_prompt=1)([make_sample(0, length=0)]) == Drop("too_short")


def test_response_diversity_ignores_case_and_white_space(make_sample) -> None:
    texts = ["The answer", "the  ANSWER\n", "the answer", "another"]
    group = [make_sample(i, response=text) for i, text in enumerate(texts)]
    assert ResponseDiversity(n_samples_per_prompt=4, minimum=0.5)(group) == Keep()
    assert ResponseDiversity(n_samples_per_prompt=4, minimum=0.51)(group) == Drop("low_diversity")


def test_quality_and_diversity_asks_for_both(make_sample) -> None:
    rule = QualityAndDiversity(n_samples_per_prompt=2, minimum_reward=1.0, minimum_diversity=1.0)
    assert rule([make_sample(0, reward=1.0), make_sample(1)]) == Keep()
    assert rule([make_sample(0, reward=0.9), make_sample(1)]) == Drop("low_reward")
    assert rule([make_sample(0, reward=1.0, response="a"), make_sample(1, response="A")]) == Drop("low_diversity")


@pytest.mark.parametrize(
    "rule",
    [
        AnySuccess(n_samples_per_prompt=2),
        CompleteGroup(n_samples_per_prompt=2),
        TruncatedFraction(n_samples_per_prompt=2),
        ResponseLength(n_samples_per_prompt=2),
        ResponseDiversity(n_samples_per_prompt=2),
        QualityAndDiversity(n_samples_per_prompt=2, minimum_reward=0.0),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_response_filters_drop_wrong_sizes_and_never_keep_an_unscored_member(make_sample, rule) -> None:
    assert rule([make_sample(0)]) == Drop("wrong_size")
    assert rule([make_sample(0), make_sample(1, reward=None)]) == Drop("unscored")
    assert rule([make_sample(0), make_sample(1)]) == Keep()


@pytest.mark.parametrize("reward", [0.1, 0.7, 0.0, -1.0, 1e12 + 0.1, 1 / 3])
def test_reward_std_drops_equal_rewards_in_spite_of_rounding(scored, reward) -> None:
    assert RewardStd(n_samples_per_prompt=8)(scored([reward] * 8)) == Drop(f"zero_std_{reward:.1f}")


def test_reward_std_keeps_one_success_among_failures(scored) -> None:
    assert RewardStd(n_samples_per_prompt=8)(scored([0.0] * 7 + [1.0])) == Keep()


def test_reward_std_drops_a_group_of_one_without_nan(scored) -> None:
    assert RewardStd(n_samples_per_prompt=1)(scored([1.0])) == Drop("zero_std_1.0")


def test_reward_std_drops_a_spread_within_the_tolerance(scored) -> None:
    group = scored([0.0, 0.2])  # population standard deviation 0.1
    assert RewardStd(n_samples_per_prompt=2, tolerance=0.11)(group) == Drop("zero_std_0.0")
    assert RewardStd(n_samples_per_prompt=2, tolerance=0.09)(group) == Keep()


def test_reward_std_reason_has_no_negative_zero(scored) -> None:
    assert RewardStd(n_samples_per_prompt=2)(scored([-0.04, -0.04])) == Drop("zero_std_0.0")


def test_reward_std_fallback_form_marks_the_group_usable(scored) -> None:
    rule = RewardStd(n_samples_per_prompt=2, keep_when_short=True)
    assert rule(scored([0.1, 0.1])) == Drop("zero_std_0.1", usable=True)
    assert rule(scored([0.1, 0.1, 0.1])) == Drop("wrong_size")
    assert rule(scored([0.1, None])) == Drop("unscored")


def test_all_correct_drops_only_when_every_reward_is_above_the_threshold(scored) -> None:
    rule = AllCorrect(n_samples_per_prompt=2)
    assert rule(scored([1.0, 0.5])) == Drop("all_correct")
    assert rule(scored([1.0, 0.0])) == Keep()
    assert AllCorrect(n_samples_per_prompt=2, threshold=1.0)(scored([1.0, 2.0])) == Keep()


def test_all_wrong_drops_only_when_no_reward_is_above_the_threshold(scored) -> None:
    rule = AllWrong(n_samples_per_prompt=2)
    assert rule(scored([0.0, -1.0])) == Drop("all_wrong")
    assert rule(scored([0.0, 0.1])) == Keep()
    assert AllWrong(n_samples_per_prompt=2, threshold=1.0)(scored([1.0, 1.0])) == Drop("all_wrong")


def judged(make_sample, **verdicts: tuple[float, Correct]):
    return [
        make_sample(index, reward=reward, correct=correct) for index, (reward, correct) in enumerate(verdicts.values())
    ]


def test_a_wrong_answer_with_a_shaped_reward_is_not_correct(make_sample) -> None:
    wrong = judged(make_sample, a=(0.18, Correct.NO), b=(0.5, Correct.NO))
    assert AllWrong(n_samples_per_prompt=2)(wrong) == Drop("all_wrong")
    assert AllCorrect(n_samples_per_prompt=2)(wrong) == Keep()
    assert AtLeastHalfCorrect(n_samples_per_prompt=2)(wrong) == Keep()


def test_a_right_answer_with_a_low_reward_is_correct(make_sample) -> None:
    right = judged(make_sample, a=(-0.5, Correct.YES), b=(0.0, Correct.YES))
    assert AllWrong(n_samples_per_prompt=2)(right) == Keep()
    assert AllCorrect(n_samples_per_prompt=2)(right) == Drop("all_correct")
    assert AtLeastHalfCorrect(n_samples_per_prompt=2)(right) == Drop("at_least_half_correct")


def test_the_threshold_decides_where_the_verdict_says_nothing(make_sample) -> None:
    group = judged(make_sample, a=(0.2, Correct.NO), b=(0.2, Correct.UNDEFINED))
    assert AllWrong(n_samples_per_prompt=2)(group) == Keep()
    assert AllWrong(n_samples_per_prompt=2, threshold=0.2)(group) == Drop("all_wrong")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [(AllWrong, "all_wrong"), (AllCorrect, "all_correct"), (AtLeastHalfCorrect, "at_least_half_correct")],
)
def test_the_bound_is_strict_or_not(scored, rule, reason) -> None:
    at_the_bound = scored([1.0, 1.0])
    strict, loose = (rule(n_samples_per_prompt=2, threshold=1.0, strict=strict) for strict in (True, False))
    assert strict(at_the_bound) == (Drop(reason) if rule is AllWrong else Keep())
    assert loose(at_the_bound) == (Keep() if rule is AllWrong else Drop(reason))


@pytest.mark.parametrize(
    ("rewards", "drops"),
    [
        ([1.0, 0.0, 0.0], True),  # 3 // 2 == 1
        ([0.0, 0.0, 0.0], False),
        ([1.0, 1.0, 0.0, 0.0], True),
        ([1.0, 0.0, 0.0, -1.0], False),
        ([1.0], True),
        ([0.0], False),
    ],
)
def test_at_least_half_correct_rounds_half_down(scored, rewards, drops) -> None:
    decision = AtLeastHalfCorrect(n_samples_per_prompt=len(rewards))(scored(rewards))
    assert decision == (Drop("at_least_half_correct") if drops else Keep())


def test_minimum_reward_looks_at_the_best_member(scored) -> None:
    rule = MinimumReward(n_samples_per_prompt=3, minimum=0.5)
    assert rule(scored([0.0, 0.5, 0.1])) == Keep()
    assert rule(scored([0.0, 0.4, 0.1])) == Drop("low_reward")


@pytest.mark.parametrize(
    "rule",
    [
        RewardStd(n_samples_per_prompt=2),
        AllCorrect(n_samples_per_prompt=2),
        AllWrong(n_samples_per_prompt=2),
        AtLeastHalfCorrect(n_samples_per_prompt=2),
        MinimumReward(n_samples_per_prompt=2, minimum=-5.0),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_reward_filters_drop_wrong_sizes_first_and_unscored_members_next(scored, rule) -> None:
    assert rule([]) == Drop("wrong_size")
    assert rule(scored([None, 1.0, 1.0])) == Drop("wrong_size")
    assert rule(scored([None, 1.0])) == Drop("unscored")


def test_a_rollout_with_forks_counts_once(make_sample) -> None:
    forks = [make_sample(0, reward=1.0, rollout_id=5), make_sample(1, reward=1.0, rollout_id=5)]
    assert AllWrong(n_samples_per_prompt=2)([*forks, make_sample(2, reward=0.0, rollout_id=6)]) == Keep()
    assert AllWrong(n_samples_per_prompt=2)(forks) == Drop("wrong_size")


def test_samples_with_rewards_of_their_own_count_with_their_mean(make_sample) -> None:
    forks = [make_sample(0, reward=1.0, rollout_id=5), make_sample(1, reward=0.0, rollout_id=5)]
    rule = RewardStd(n_samples_per_prompt=2)
    assert rule([*forks, make_sample(2, reward=0.5, rollout_id=6)]) == Drop("zero_std_0.5")
    assert rule([*forks, make_sample(2, reward=0.0, rollout_id=6)]) == Keep()


def test_a_reward_that_is_not_finite_is_an_error(scored) -> None:
    with pytest.raises(RewardError, match="rollout 1 has reward nan"):
        RewardStd(n_samples_per_prompt=2)(scored([0.0, float("nan")]))


def test_reward_key_picks_the_number_from_a_dictionary(scored) -> None:
    group = scored([{"score": 1.0, "format": 0.0}, {"score": 0.0, "format": 0.0}])
    assert RewardStd(n_samples_per_prompt=2, reward_key="score")(group) == Keep()
    assert RewardStd(n_samples_per_prompt=2, reward_key="format")(group) == Drop("zero_std_0.0")
    with pytest.raises(RewardError, match="reward_key = 'scores'"):
        RewardStd(n_samples_per_prompt=2, reward_key="scores")(group)


@pytest.mark.parametrize("tolerance", [-1e-9, float("nan"), float("inf")])
def test_a_tolerance_out_of_range_is_refused(tolerance) -> None:
    with pytest.raises(ConfigError, match="tolerance = "):
        RewardStd(n_samples_per_prompt=2, tolerance=tolerance)
