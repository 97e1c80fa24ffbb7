"""Counts where every prompt of a finished run went, from its Parquet files alone.

Nothing of the package reads them here: what would be wrong in its reader, its ledger or its journal shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rollfeed.benchmarks.chaos.job import ChaosJob

_COLUMNS = (
    *("step", "group_index", "prompt_id", "rollout_id", "index", "prompt_token_ids", "token_ids", "response_length"),
    *("loss_mask", "logprobs", "spans", "status", "reward", "advantage"),
)


@dataclass(slots=True, kw_only=True)
class Recount:
    """The prompts in the files of one run, and whatever is wrong there."""

    trained: list[str] = field(default_factory=list)
    """Prompt ids in the order in which they were trained."""
    dropped: list[str] = field(default_factory=list)
    num_steps: int = 0
    lost: list[str] = field(default_factory=list)
    """Prompts of the data set that are nowhere."""
    duplicated: list[str] = field(default_factory=list)
    """Prompts that are there more than once, and as often as they are too many."""
    problems: list[str] = field(default_factory=list)
    """Everything else that is wrong."""


def recount(out: Path, job: ChaosJob, *, ledger: Mapping[str, float]) -> Recount:
    """Read all files of a run and compare them with what the job must come to.

    What the run itself counted, its ``ledger``, is only compared with.
    """
    counts = Recount()
    problems = counts.problems
    group_indices: Counter[int] = Counter()
    for number, path in enumerate(sorted((out / "batches").glob("step-*.parquet"))):
        groups = _groups(path)
        if {row["step"] for rows in groups for row in rows} != {number} or path.name != f"step-{number:06d}.parquet":
            problems.append(f"{path.name}: steps are not contiguous, or not this one's: {number} is expected")
        if len(groups) != job.batch_size:
            problems.append(f"{path.name}: {len(groups)} groups")
        for rows in groups:
            problems += [f"{path.name}, group {rows[0]['group_index']}: {each}" for each in _wrong(rows, job)]
            group_indices[rows[0]["group_index"]] += 1
        counts.trained += [rows[0]["prompt_id"] for rows in groups]
        counts.num_steps += 1
    for path in sorted((out / "dropped").glob("step-*.parquet")):
        groups = _groups(path, with_reason=True)
        for rows in groups:
            group_indices[rows[0]["group_index"]] += 1
            if rows[0]["prompt_id"] not in job.dropped_ids and not job.environments:
                problems.append(f"{path.name}: {rows[0]['prompt_id']} is dropped as {rows[0]['drop_reason']}")
        counts.dropped += [rows[0]["prompt_id"] for rows in groups]
    _compare(counts, job, group_indices, ledger)
    return counts


def num_reordered(trained: Sequence[str], unbroken: Sequence[str]) -> int:
    """Return at how many places two sequences of trained prompts differ."""
    return sum(ours != theirs for ours, theirs in zip_longest(trained, unbroken))


def _compare(counts: Recount, job: ChaosJob, group_indices: Counter[int], ledger: Mapping[str, float]) -> None:
    times = Counter([*counts.trained, *counts.dropped])
    all_ids = job.kept_ids | job.dropped_ids
    counts.lost = sorted(all_ids - times.keys())
    if job.environments:
        all_ids = frozenset(times)
        # Every prompt that was drawn is in a file or waits.
        waiting = int(sum(ledger.get(place, 0) for place in ("requeued", "in_flight", "surplus")))
        missing = sorted(set(range(times.total() + waiting)) - group_indices.keys())
        counts.lost = [f"group {index}" for index in missing[waiting:]]
    counts.duplicated = sorted((times - Counter(times.keys())).elements())
    problems = counts.problems
    problems += [f"{prompt_id}: not a prompt of the data set" for prompt_id in sorted(times.keys() - all_ids)]
    problems += [f"{prompt_id}: trained, but to be dropped" for prompt_id in job.dropped_ids & {*counts.trained}]
    problems += [f"group index {index}: given {number} times" for index, number in group_indices.items() if number > 1]
    if counts.num_steps != job.num_steps:
        problems.append(f"{counts.num_steps} steps of {job.num_steps}")
    found = {"trained": len(counts.trained), "dropped": len(counts.dropped)}
    if not job.environments:
        found["drawn"] = times.total()
    for place, number in found.items():
        if ledger.get(place) != number:
            problems.append(f"ledger: {place} is {ledger.get(place)} in the journal, {number} in the files")


def _groups(path: Path, *, with_reason: bool = False) -> list[list[dict[str, Any]]]:
    columns = [*_COLUMNS, "drop_reason"] if with_reason else list(_COLUMNS)
    rows = pq.read_table(path, columns=columns, partitioning=None).to_pylist()
    return [list(members) for _, members in groupby(rows, key=lambda row: row["group_index"])]


def _wrong(rows: Sequence[Mapping[str, Any]], job: ChaosJob) -> Iterator[str]:
    """Tell what is wrong with a trained group."""
    if len(rows) != job.group_size or len({row["rollout_id"] for row in rows}) != job.group_size:
        yield f"{len(rows)} samples of {len({row['rollout_id'] for row in rows})} rollouts"
    if len({row["prompt_id"] for row in rows}) != 1:
        yield "several prompts"
    for row in rows:
        yield from (f"sample {row['index']}: {each}" for each in _wrong_in_sample(row))


def _wrong_in_sample(row: Mapping[str, Any]) -> Iterator[str]:
    length, prompt = row["response_length"], row["prompt_token_ids"]
    if row["token_ids"][: len(prompt)] != prompt or len(row["token_ids"]) != len(prompt) + length:
        yield f"{len(row['token_ids'])} tokens for {len(prompt)} of the prompt and {length} of the response"
    if length < 1 or len(row["loss_mask"]) != length or len(row["logprobs"]) != length:
        yield f"{len(row['loss_mask'])} mask values and {len(row['logprobs'])} logprobs for {length} tokens"
    if not all(math.isfinite(value) and value <= 0.0 for value in row["logprobs"]):
        yield "a logprob is not finite, or above 0"
    if set(row["loss_mask"]) - {0.0, 1.0}:
        yield "a mask value is neither 0 nor 1"
    edges = [0, *(span["end"] for span in row["spans"])]
    if [span["start"] for span in row["spans"]] != edges[:-1] or edges[-1] != length:
        yield f"version spans {row['spans']} do not cover {length} tokens"
    if row["status"] not in ("completed", "truncated"):
        yield f"status {row['status']}"
    if row["advantage"] is None or not math.isfinite(row["advantage"]):
        yield f"advantage {row['advantage']}"
    if row["reward"] != float(row["index"] % 2):
        yield f"reward {row['reward']}"
