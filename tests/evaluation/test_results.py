from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollfeed.evaluation import (
    EvalResult,
    EvalSet,
    SetResult,
    cluster_interval,
    is_right,
    summarise,
    wilson_interval,
)
from rollfeed.testing import make_group, make_sample
from rollfeed.types import Correct, Group, SampleStatus, Verdict


def with_verdicts(rewards: list[float], correct: list[Correct]) -> Group:
    group = make_group(rewards)
    rollouts = [
        each.with_reward(Verdict(reward=reward, correct=right, format_ok=right is Correct.YES))
        for each, reward, right in zip(group.rollouts, rewards, correct, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_numbers_of_a_set(make_set: Callable[..., EvalSet], result_of: Callable[..., Any]) -> None:
    found = summarise(
        make_set(num_prompts=3),
        [result_of([1, 1, 1, 1]), result_of([1, 0, 0, 0], index=1), result_of([0, 0, 0, 0], index=2)],
    )
    assert found.num_prompts == 3
    assert found.reward_mean == found.accuracy == pytest.approx(5 / 12)
    assert found.pass_at_k == pytest.approx({1: 5 / 12, 2: 0.5, 4: 2 / 3})
    assert found.pass_hat_k == pytest.approx({1: 5 / 12, 2: 1 / 3, 4: 1 / 3})
    assert found.accuracy_interval == cluster_interval([1.0, 0.25, 0.0], num_trials=4)
    assert found.pass_at_k_interval[1] == found.accuracy_interval
    assert found.pass_at_k_interval[4] == wilson_interval(2, 3)
    assert found.pass_hat_k_interval[2] == cluster_interval([1.0, 0.0, 0.0], num_trials=2)
    assert found.right_P == (4, 1, 0)
    assert (found.response_length_mean, found.response_length_max) == (1.0, 1)


def test_r40_pass_at_k_is_of_each_prompts_answers_and_then_the_mean_over_prompts(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    """R40: n and c are answers of one prompt, not prompts, and no k is above n."""
    results = [result_of([1, 1, 1]), result_of([0, 0, 0], index=1), result_of([0, 0, 0], index=2)]
    found = summarise(make_set(num_prompts=3, n_samples_per_prompt=3), results)
    assert found.pass_at_k == pytest.approx({1: 1 / 3, 2: 1 / 3})
    pooled = 1 - (6 * 5) / (9 * 8)
    assert found.pass_at_k[2] != pytest.approx(pooled)


def test_graders_say_what_is_right_whatever_the_reward_is() -> None:
    group = with_verdicts([0.2, 1.0, 1.0], [Correct.YES, Correct.NO, Correct.UNDEFINED])
    assert [is_right(each, reward_key=None, threshold=1.0) for each in group.rollouts] == [True, False, True]


def test_threshold_says_what_is_right_where_graders_do_not(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    results = [result_of([0.5, 2.0]), result_of([0.4, 0.0], index=1)]
    assert summarise(make_set(n_samples_per_prompt=2), results).accuracy == 0.25
    assert summarise(make_set(n_samples_per_prompt=2, correct_threshold=0.5), results).accuracy == 0.5


def test_reward_dictionaries_are_read_by_the_sets_key(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    chosen = make_set(n_samples_per_prompt=2, num_prompts=1, eval_reward_key="strict")
    found = summarise(chosen, [result_of([{"score": 1.0, "strict": 0.0}, {"score": 1.0, "strict": 1.0}])])
    assert (found.reward_mean, found.accuracy) == (0.5, 0.5)


def test_a_prompt_that_failed_is_in_no_number_but_its_count(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    failed = result_of([0, 0, 0, 0], index=1, cause="prompt 1: reward timeout")
    found = summarise(make_set(), [result_of([1, 1, 1, 1]), failed])
    assert (found.num_prompts, found.num_failed, found.accuracy) == (1, 1, 1.0)
    assert found.first_failure == "prompt 1: reward timeout"
    assert len(found.groups) == 2


def test_where_every_prompt_failed_there_is_no_accuracy_rather_than_0(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    found = summarise(make_set(num_prompts=1), [result_of([0] * 4, cause="broken")])
    assert (found.accuracy, found.reward_mean, found.truncated_ratio) == (None, None, None)
    assert found.accuracy_interval == (0.0, 1.0)
    assert found.pass_at_k == {}
    assert made_of(found).accuracy is None


def test_truncated_answers_are_counted_and_scored(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    group = make_group([1.0, 1.0])
    cut = replace(group.rollouts[0].samples[0], status=SampleStatus.TRUNCATED)
    group = replace(group, rollouts=(replace(group.rollouts[0], samples=(cut,)), group.rollouts[1]))
    found = summarise(make_set(n_samples_per_prompt=2, num_prompts=1), [result_of([], group=group)])
    assert (found.truncated_ratio, found.accuracy) == (0.5, 1.0)


def test_every_number_of_a_set_is_named_by_the_set(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Group]
) -> None:
    group = with_verdicts([1.0, 0.5], [Correct.YES, Correct.NO])
    long = replace(make_sample("12345", reward=0.5), status=SampleStatus.TRUNCATED)
    group = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[1], samples=(long,))))
    chosen = replace(make_set("core/x@1", num_prompts=2, n_samples_per_prompt=2), num_over_length=3)
    results = [
        group,
        result_of([0.0, 0.0], index=1, cause="timeout"),
    ]
    metrics = made_of(summarise(chosen, results)).metrics()
    low, high = wilson_interval(0.5, 1)
    numbers = {
        "num_prompts": 1.0,
        "n_samples_per_prompt": 2.0,
        "num_failed": 1.0,
        "num_over_length": 3.0,
        "num_repeats": 0.0,
        "num_missing": 0.0,
        "reward_mean": 0.75,
        "accuracy": 0.5,
        "accuracy_low": low,
        "accuracy_high": high,
        "pass@1": 0.5,
        "pass@2": 1.0,
        "pass^1": 0.5,
        "pass^2": 0.0,
        "truncated_ratio": 0.5,
        "format_ok_ratio": 0.5,
        "response_length_mean": 3.0,
        "response_length_median": 3.0,
        "response_length_max": 5.0,
    }
    assert metrics == {f"eval/core/x@1/{name}": value for name, value in numbers.items()}
    assert all(type(value) is float for value in metrics.values())


def made_of(*sets: SetResult) -> EvalResult:
    return EvalResult(sets=sets, seed=0, policy_versions=(0, 0), seconds=1.0, num_tokens=1)


def test_accuracy_of_all_is_the_mean_of_the_sets(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    large = summarise(make_set("a", num_prompts=3), [result_of([1] * 4, index=index) for index in range(3)])
    small = summarise(make_set("b", num_prompts=1), [result_of([0] * 4)])
    assert made_of(large, small).accuracy == 0.5
    assert list(made_of(large, small).summary()["sets"]) == ["a", "b"]
