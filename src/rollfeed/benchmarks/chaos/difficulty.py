"""Compares what a run has learned of environments' levels with what lies in its files, and with an unbroken run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rollfeed.benchmarks.chaos.job import ChaosJob
from rollfeed.store import RunReader


def learned(out: Path, job: ChaosJob) -> dict[str, Any]:
    """Return the state that a finished run's source of environments left."""
    with RunReader(out) as run:
        state: dict[str, Any] = run.state(job.num_steps - 1).source["sources"]["adaptive"]
    return state


def wrong_levels(state: Mapping[str, Any], out: Path, *, num_surplus: float) -> Iterator[str]:
    """Tell where the tables of a run's levels do not count the groups of its files, each once.

    ``num_surplus`` groups are scored and wait for a batch that never came.
    """
    in_files, right = Counter[str](), Counter[str]()
    for path in sorted(out.glob("[bd]*/step-*.parquet")):
        seen: set[int] = set()
        for row in pq.read_table(path, columns=["group_index", "prompt_id", "correct"], partitioning=None).to_pylist():
            level = row["prompt_id"].partition("/train/")[0]
            in_files[level] += row["group_index"] not in seen
            right[level] += row["correct"] == "yes"
            seen.add(row["group_index"])
    told = {
        f"{name}@{row[0]}": dict(zip(state["columns"], row, strict=True))
        for name, environment in state["environments"].items()
        for row in environment["difficulty"]["levels"]
    }
    more = {
        level: told.get(level, Counter())["num_groups"] - in_files[level] for level in told.keys() | in_files.keys()
    }
    for level, count in sorted(more.items()):
        if count < 0 or (count == 0 and level in told and told[level]["num_correct"] != right[level]):
            yield f"{level}: the table has {told.get(level)}, the files {in_files[level]} groups, {right[level]} right"
    if sum(more.values()) != num_surplus:
        yield f"the tables count {sum(more.values())} groups that are in no file, and {num_surplus:g} wait"
