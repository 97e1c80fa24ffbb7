"""Two evaluations of the same prompts, compared prompt by prompt.

Axes: P prompts that both have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from rollfeed.errors import ConfigError
from rollfeed.evaluation.statistics import Interval, paired_interval

ANSWER_COLUMNS = ("set", "prompt_id", "label", "correct")

Outcomes: TypeAlias = Mapping[str, Mapping[str, tuple[int, int]]]
"""By set and prompt: right answers, and answers."""


@dataclass(frozen=True, slots=True)
class SetComparison:
    """The change from one evaluation to another in a set."""

    name: str
    num_prompts: int
    """That both have; the numbers are of these."""
    accuracy_before: float
    accuracy_after: float
    change: float
    interval: Interval
    """Of the change, at 95 %, paired by prompt."""
    num_better: int
    """Prompts with a larger share of right answers after."""
    num_worse: int
    num_unpaired: int
    """Prompts that only one of them has, or that failed in one."""

    def summary(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        low, high = self.interval
        names = (
            "num_prompts",
            "accuracy_before",
            "accuracy_after",
            "change",
            "num_better",
            "num_worse",
            "num_unpaired",
        )
        return {name: getattr(self, name) for name in names} | {"low": low, "high": high}


def compare(before: Outcomes, after: Outcomes) -> tuple[SetComparison, ...]:
    """Return the change of every set that both have, over the prompts that both have.

    Raises:
        ConfigError: If they have no prompt in common.
    """
    found = tuple(comparisons(before, after))
    if not found:
        names = [", ".join(sorted(each)) or "none" for each in (before, after)]
        raise ConfigError(
            f"the evaluations have no prompt in common: the sets of one are {names[0]}, of the other {names[1]}; "
            "compare evaluations of the same sets"
        )
    return found


def comparisons(before: Outcomes, after: Outcomes) -> Iterator[SetComparison]:
    """Yield the change of every set with prompts that both have."""
    for name, first in before.items():
        last = after.get(name, {})
        shared = [key for key in first if key in last]
        if not shared:
            continue
        before_P, after_P = ([right / n for right, n in map(each.__getitem__, shared)] for each in (first, last))
        trials = [max(n for _, n in each.values()) for each in (first, last)]
        pairs = list(zip(before_P, after_P, strict=True))
        yield SetComparison(
            name=name,
            num_prompts=len(shared),
            accuracy_before=fmean(before_P),
            accuracy_after=fmean(after_P),
            change=fmean(after_P) - fmean(before_P),
            interval=paired_interval(before_P, after_P, trials_before=trials[0], trials_after=trials[1]),
            num_better=sum(one < other for one, other in pairs),
            num_worse=sum(one > other for one, other in pairs),
            num_unpaired=len(first) + len(last) - 2 * len(shared),
        )


def outcomes_of_answers(rows: Iterable[Mapping[str, Any]]) -> Outcomes:
    """Return what rows with :data:`ANSWER_COLUMNS` of a table of answers tell; a prompt with a failed one is left out.

    Raises:
        KeyError: If a row has not all of them.
    """
    right: dict[str, Counter[str]] = defaultdict(Counter)
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    failed: set[tuple[str, str]] = set()
    for row in rows:
        key = f"{row['prompt_id']} {row['label']}"
        answers[row["set"]][key] += 1
        right[row["set"]][key] += row["correct"] is True
        if row["correct"] is None:
            failed.add((row["set"], key))
    return {
        name: {key: (right[name][key], count) for key, count in counts.items() if (name, key) not in failed}
        for name, counts in answers.items()
    }


def outcomes_of_record(record: Mapping[str, Any]) -> Outcomes:
    """Return what a line of eval.jsonl tells; prompts are the same where their sets ask the same in the same order.

    Raises:
        KeyError: If it is of a version that kept no answers.
    """
    return {
        name: {
            f"{asked['digest']} {number}": (right, record["sets"][name]["n_samples_per_prompt"])
            for number, right in enumerate(asked["right"])
            if right is not None
        }
        for name, asked in record["prompts"].items()
    }
