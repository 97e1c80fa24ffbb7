from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq

from rollfeed.evaluation import ANSWERS_SCHEMA, EvalResult, EvalSet, answers_table, summarise
from rollfeed.testing import make_group
from rollfeed.types import Group, Rollout


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
    assert rows[0]["label"] == '"4"'
    assert rows[1]["response"] == "1"


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
