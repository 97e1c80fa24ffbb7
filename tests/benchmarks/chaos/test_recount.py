from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollfeed.benchmarks.chaos.job import ChaosJob
from rollfeed.benchmarks.chaos.recount import num_reordered, recount

KEPT = ("prompts/0@e0", "prompts/1@e0", "prompts/3@e0", "prompts/4@e0")
DROPPED = "prompts/2@e0"
Change = Callable[[list[list[dict[str, Any]]]], object]


def group_of(prompt_id: str, group_index: int, step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "group_index": group_index,
            "prompt_id": prompt_id,
            "rollout_id": 2 * group_index + member,
            "index": 2 * group_index + member,
            "prompt_token_ids": [7, 8],
            "token_ids": [7, 8, 1, 2, 3],
            "response_length": 3,
            "loss_mask": [1.0, 1.0, 0.0],
            "logprobs": [-0.5, -0.25, 0.0],
            "spans": [{"start": 0, "end": 2, "policy_version": 0}, {"start": 2, "end": 3, "policy_version": 1}],
            "status": "completed",
            "reward": float(member),
            "advantage": member - 0.5,
        }
        for member in range(2)
    ]


def write(path: Path, groups: list[list[dict[str, Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row for group in groups for row in group]), path)


@pytest.fixture
def problems_after(tmp_path: Path) -> Callable[[Change], tuple[int, int, list[str]]]:
    """Return the function that changes the groups of a right run, writes them, and recounts."""

    def run(change: Change) -> tuple[int, int, list[str]]:
        groups = [group_of(prompt_id, number + (number > 1), number // 2) for number, prompt_id in enumerate(KEPT)]
        change(groups)
        for step in {group[0]["step"] for group in groups}:
            name = f"step-{step:06d}.parquet"
            write(tmp_path / "batches" / name, [group for group in groups if group[0]["step"] == step])
        dropped = [{**row, "advantage": None, "drop_reason": "spread"} for row in group_of(DROPPED, 2, 0)]
        write(tmp_path / "dropped" / "step-000000.parquet", [dropped])
        job = ChaosJob(
            folder=tmp_path,
            num_steps=2,
            batch_size=2,
            group_size=2,
            kept_ids=frozenset(KEPT),
            dropped_ids=frozenset({DROPPED}),
        )
        counts = recount(tmp_path, job, ledger={"trained": 4, "dropped": 1, "drawn": 5})
        return len(counts.lost), len(counts.duplicated), counts.problems

    return run


def test_a_right_run_has_no_problem(problems_after: Callable[[Change], Any]) -> None:
    assert problems_after(lambda groups: None) == (0, 0, [])


def test_a_prompt_that_is_nowhere_is_lost(problems_after: Callable[[Change], Any]) -> None:
    lost, duplicated, problems = problems_after(lambda groups: groups.pop())
    assert (lost, duplicated) == (1, 0)
    assert "step-000001.parquet: 1 groups" in problems


def test_a_prompt_that_is_trained_twice_is_duplicated(problems_after: Callable[[Change], Any]) -> None:
    def again(groups: list[list[dict[str, Any]]]) -> None:
        groups[3] = group_of(KEPT[0], 4, 1)

    assert problems_after(again)[:2] == (1, 1)


def test_a_group_index_that_is_given_twice_shows(problems_after: Callable[[Change], Any]) -> None:
    def again(groups: list[list[dict[str, Any]]]) -> None:
        groups[3] = group_of(KEPT[3], 2, 1)

    assert problems_after(again) == (0, 0, ["group index 2: given 2 times"])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("token_ids", [7, 8, 1, 2], "4 tokens for 2 of the prompt and 3 of the response"),
        ("token_ids", [7, 9, 1, 2, 3], "5 tokens for 2 of the prompt and 3 of the response"),
        ("loss_mask", [1.0, 1.0], "2 mask values and 3 logprobs for 3 tokens"),
        ("loss_mask", [1.0, 1.0, 0.5], "a mask value is neither 0 nor 1"),
        ("logprobs", [-1.0, 0.5, 0.0], "a logprob is not finite, or above 0"),
        ("spans", [{"start": 0, "end": 2, "policy_version": 0}], "do not cover 3 tokens"),
        ("status", "aborted", "status aborted"),
        ("advantage", float("nan"), "advantage nan"),
        ("reward", None, "reward None"),
        ("rollout_id", 2, "2 samples of 1 rollouts"),
        ("step", 1, "steps are not contiguous"),
    ],
)
def test_what_is_wrong_in_a_sample_is_told(
    problems_after: Callable[[Change], Any], name: str, value: Any, told: str
) -> None:
    _, _, problems = problems_after(lambda groups: groups[1][1].update({name: value}))
    assert told in " ".join(problems)


def test_a_ledger_that_counts_otherwise_is_told(problems_after: Callable[[Change], Any]) -> None:
    _, _, problems = problems_after(lambda groups: groups.pop(0))
    assert "ledger: trained is 4 in the journal, 3 in the files" in problems


def test_places_that_differ_are_counted_on_to_the_longer_end() -> None:
    assert num_reordered(["a", "b", "c"], ["a", "b", "c"]) == 0
    assert num_reordered(["a", "c", "b"], ["a", "b", "c"]) == 2
    assert num_reordered(["a", "b"], ["a", "b", "c"]) == 1
