"""Counts what the tool of agents has done, from the lines that it left and from what the samples were told.

As in :mod:`rollfeed.benchmarks.chaos.recount`, nothing of the package reads the files of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rollfeed.benchmarks.chaos.job import DONE, LOST, NUM_CALLS, ChaosJob, effects_file

_COLUMNS = ("prompt_id", "index", "prompt_token_ids", "token_ids", "loss_mask")


@dataclass(slots=True, kw_only=True)
class Effects:
    """The calls of a run's agents, by prompt, member of the group, and number in the episode."""

    num_done: int = 0
    repeated: list[str] = field(default_factory=list)
    """Calls that left more than one line."""
    missing: list[str] = field(default_factory=list)
    """Calls of which a sample was told that they were done, and which left none."""
    num_unsure: int = 0
    """Calls that a killed process had begun, and of which the sample was told that nobody knows."""
    problems: list[str] = field(default_factory=list)
    """Everything else that is wrong."""

    def figures(self) -> dict[str, int]:
        """Return them as JSON values."""
        numbers = {"repeated": len(self.repeated), "missing": len(self.missing), "unsure": self.num_unsure}
        return {"calls": self.num_done, **numbers}


def read_calls(out: Path) -> Counter[str]:
    """Return how often each call was made, as far as there are whole lines."""
    path = effects_file(out)
    return Counter(path.read_text().split("\n")[:-1] if path.exists() else [])


def num_open_episodes(calls: Mapping[str, int]) -> int:
    """Return how many episodes have made their first call and not their last one."""
    made: dict[str, set[str]] = {}
    for call in calls:
        episode, _, number = call.rpartition(" ")
        made.setdefault(episode, set()).add(number)
    return sum("0" in numbers and str(NUM_CALLS - 1) not in numbers for numbers in made.values())


def count_effects(out: Path, job: ChaosJob) -> Effects:
    """Compare the lines that a finished run's tool left with what its samples were told; nothing without agents."""
    calls, effects = read_calls(out), Effects()
    if not job.agents:
        return effects
    tokenizer = Tokenizer.from_file(str(job.folder / "model" / "tokenizer.json"))
    effects.num_done = calls.total()
    effects.repeated = sorted(call for call, times in calls.items() if times > 1)
    told_of: dict[str, str] = {}
    for path in sorted(out.glob("[bd]*/step-*.parquet")):
        for row in pq.read_table(path, columns=list(_COLUMNS), partitioning=None).to_pylist():
            episode = f"{row['prompt_id']} {row['index'] % job.group_size}"
            told = [tokenizer.decode(ids, skip_special_tokens=False) for ids in _inserted(row)]
            if len(told) != NUM_CALLS or {*told} - {DONE, LOST}:
                effects.problems.append(f"{episode}: was told {told}")
            told_of |= {f"{episode} {number}": each for number, each in enumerate(told)}
    effects.missing = sorted(call for call, told in told_of.items() if told == DONE and call not in calls)
    effects.num_unsure = sum(told == LOST for told in told_of.values())
    effects.problems += [f"{call}: no sample was told of it" for call in sorted(calls.keys() - told_of.keys())]
    return effects


def _inserted(row: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the tokens that nobody sampled, a piece a time."""
    response = row["token_ids"][len(row["prompt_token_ids"]) :]
    for weight, pairs in groupby(zip(row["loss_mask"], response, strict=True), key=lambda pair: pair[0]):
        if weight == 0.0:
            yield [token for _, token in pairs]
