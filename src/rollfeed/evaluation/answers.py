"""All answers of an evaluation as a table, one row each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from rollfeed.evaluation.results import EvalResult, SetResult, is_right
from rollfeed.types import Group, Rollout, SampleStatus
from rollfeed.types.text import well_formed

ANSWERS_SCHEMA = pa.schema(
    [
        ("set", pa.string()),
        ("index", pa.int64()),
        ("answer", pa.int64()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("label", pa.string()),
        ("response", pa.string()),
        ("status", pa.string()),
        ("response_length", pa.int64()),
        ("reward", pa.float64()),
        ("correct", pa.bool_()),
        ("extracted", pa.string()),
        ("error", pa.string()),
    ]
)
"""``label`` is JSON text; ``reward`` and ``correct`` are null where an answer could not be scored."""


def answers_table(result: EvalResult) -> pa.Table:
    """Return the answers ordered by set, index of the prompt and number of the answer."""
    rows = [row for each in result.sets for group in each.groups for row in _rows(each, group)]
    return pa.Table.from_pylist(rows, schema=ANSWERS_SCHEMA)


def _rows(found: SetResult, group: Group) -> Iterator[dict[str, Any]]:
    prompt = group.prompt
    for number, rollout in enumerate(group.rollouts):
        yield {
            "set": well_formed(found.name),
            "index": group.group_index,
            "answer": number,
            "prompt_id": well_formed(prompt.prompt_id),
            "prompt": well_formed(prompt.text),
            "label": json.dumps(prompt.label),
            **_answer(found, rollout),
        }


def _answer(found: SetResult, rollout: Rollout) -> dict[str, Any]:
    sample = rollout.samples[-1] if rollout.samples else None
    is_scored = bool(rollout.samples) and all(each.reward is not None for each in rollout.samples)
    extracted = rollout.verdict.extracted if rollout.verdict is not None else None
    correct = is_scored and is_right(rollout, reward_key=found.reward_key, threshold=found.correct_threshold)
    return {
        "response": None if sample is None else well_formed(sample.response),
        "status": (SampleStatus.FAILED if sample is None else sample.status).value,
        "response_length": rollout.response_tokens,
        "reward": rollout.get_reward_value(found.reward_key) if is_scored else None,
        "correct": correct if is_scored else None,
        "extracted": None if extracted is None else well_formed(extracted),
        "error": None if rollout.error is None else well_formed(rollout.error),
    }
