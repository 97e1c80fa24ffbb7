from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollfeed.evaluation import (
    ANSWERS_SCHEMA,
    EvalResult,
    EvalSet,
    SetResult,
    answers_table,
    is_right,
    log_record,
    summarise,
)
from rollfeed.evaluation.statistics import cluster_interval, paired_interval, wilson_interval
from rollfeed.testing import make_group, make_prompt, make_sample
from rollfeed.types import Correct, Group, Rollout, SampleStatus, Verdict


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


ResultOf = Callable[..., Any]


def record(
    eval_set: EvalSet, result_of: ResultOf, rewards_by_prompt: list[Any], *, step: int = 0, first: Any = None
) -> dict[str, Any]:
    """Return the line of an evaluation; a prompt without rewards failed."""
    results = [
        result_of(rewards or [0.0], index=index, cause="" if rewards else "timeout")
        for index, rewards in enumerate(rewards_by_prompt)
    ]
    asked = [replace(result, prompt=prompt) for result, prompt in zip(results, eval_set.prompts, strict=True)]
    found = EvalResult(sets=(summarise(eval_set, asked),), seed=0, policy_versions=(0, 0), seconds=1.0, num_tokens=1)
    made: dict[str, Any] = json.loads(json.dumps(log_record(found, step=step, first=first)))
    return made


def test_the_change_is_over_the_prompts_that_both_evaluations_scored(
    make_set: Callable[..., EvalSet], result_of: ResultOf
) -> None:
    numbers = make_set(num_prompts=4, n_samples_per_prompt=2)
    first = record(numbers, result_of, [[0, 0], [1, 0], [1, 1], [1, 1]])
    assert first["change"] == {}
    assert first["prompts"]["numbers"]["right"] == [0, 1, 2, 2]
    last = record(numbers, result_of, [[1, 0], [1, 1], [1, 1], None], step=6, first=first)
    change = last["change"]["numbers"]
    low, high = paired_interval([0.0, 0.5, 1.0], [0.5, 1.0, 1.0], trials_before=2, trials_after=2)
    assert change == {"since": 0, "num_prompts": 3, "accuracy": pytest.approx(1 / 3), "low": low, "high": high}


def test_other_prompts_are_not_compared(make_set: Callable[..., EvalSet], result_of: ResultOf) -> None:
    numbers = make_set(n_samples_per_prompt=1)
    first = record(numbers, result_of, [[0], [1]])
    others = replace(numbers, prompts=(numbers.prompts[0], make_prompt("something else")))
    assert record(others, result_of, [[0], [1]], step=1, first=first)["change"] == {}
    turned = replace(numbers, prompts=numbers.prompts[::-1])
    assert record(turned, result_of, [[0], [1]], step=1, first=first)["change"] == {}
    renamed = replace(numbers, name="letters")
    assert record(renamed, result_of, [[0], [1]], step=1, first=first)["change"] == {}


def test_a_first_evaluation_of_a_version_that_kept_no_answers_is_not_compared_with(
    make_set: Callable[..., EvalSet], result_of: ResultOf
) -> None:
    numbers = make_set(n_samples_per_prompt=1)
    first = record(numbers, result_of, [[0], [1]])
    del first["prompts"], first["change"]
    assert record(numbers, result_of, [[0], [1]], step=1, first=first)["change"] == {}


def test_where_no_prompt_was_scored_twice_there_is_no_change(
    make_set: Callable[..., EvalSet], result_of: ResultOf
) -> None:
    numbers = make_set(n_samples_per_prompt=1)
    first = record(numbers, result_of, [None, [1]])
    assert record(numbers, result_of, [[1], None], step=1, first=first)["change"] == {}


def table_rows(*sets: Any) -> list[dict[str, Any]]:
    table = answers_table(EvalResult(sets=sets, seed=0, policy_versions=(0, 0), seconds=1.0, num_tokens=1))
    assert table.schema == ANSWERS_SCHEMA
    file = io.BytesIO()
    pq.write_table(table, file)
    return pq.read_table(file).to_pylist()


def test_there_is_a_row_an_answer_in_order(make_set: Callable[..., EvalSet], result_of: Callable[..., Any]) -> None:
    first = summarise(make_set("a", n_samples_per_prompt=2), [result_of([1, 0]), result_of([0.5, 1], index=1)])
    second = summarise(make_set("b", n_samples_per_prompt=1, num_prompts=1), [result_of([1])])
    rows = table_rows(first, second)
    assert [(row["set"], row["index"], row["answer"]) for row in rows] == [
        ("a", 0, 0),
        ("a", 0, 1),
        ("a", 1, 0),
        ("a", 1, 1),
        ("b", 0, 0),
    ]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5, 1.0, 1.0]
    assert [row["correct"] for row in rows] == [True, False, False, True, True]
    assert (rows[0]["label"], rows[0]["messages"]) == ('"4"', None)
    assert rows[1]["response"] == "1"


def test_messages_are_stored_as_json(make_set: Callable[..., EvalSet], result_of: Callable[..., Any]) -> None:
    group = result_of([1])
    asked = ({"role": "user", "content": "\ud800?"},)
    group = replace(group, prompt=replace(group.prompt, messages=asked))
    (row,) = table_rows(summarise(make_set(n_samples_per_prompt=1, num_prompts=1), [group]))
    assert json.loads(row["messages"]) == list(asked)


def test_what_could_not_be_scored_has_no_reward_and_a_cause(make_set: Callable[..., EvalSet]) -> None:
    whole = make_group([1.0])
    failed = Rollout(rollout_id=0, samples=(), error="prompt 0: engine closed")
    group = Group(group_index=0, prompt=whole.prompt, rollouts=(failed,))
    (row,) = table_rows(summarise(make_set(num_prompts=1, n_samples_per_prompt=1), [group]))
    assert (row["reward"], row["correct"], row["response"], row["status"]) == (None, None, None, "failed")
    assert row["error"] == "prompt 0: engine closed"


def test_text_that_utf8_cannot_carry_has_replacement_characters(
    make_set: Callable[..., EvalSet], result_of: Callable[..., Any]
) -> None:
    group = make_group([1.0])
    sample = replace(group.rollouts[0].samples[0], response="\ud800x")
    group = replace(group, rollouts=(replace(group.rollouts[0], samples=(sample,)),))
    (row,) = table_rows(summarise(make_set(num_prompts=1, n_samples_per_prompt=1), [result_of([], group=group)]))
    assert row["response"] == "\ufffdx"
