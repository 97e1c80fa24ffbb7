from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollfeed.evaluation import EvalResult, EvalSet, log_record, paired_interval, summarise
from rollfeed.testing import make_prompt

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
