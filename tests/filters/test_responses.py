from __future__ import annotations

import pytest

from rollfeed.filters import (
    AnySuccess,
    CompleteGroup,
    QualityAndDiversity,
    ResponseDiversity,
    ResponseLength,
    TruncatedFraction,
)
from rollfeed.types import Drop, Keep, SampleStatus

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
