"""The curves of a run that trains, made from the records of its logs.

Invariant: every number of a point is finite; what is missing or not finite is left out, never drawn as a 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

_MISMATCH = "train/mismatch_kl"
_LARGEST = 1e100  # what is beyond it would leave no room to compute an axis


class Point(NamedTuple):
    """One number of a curve, with its interval; the interval is the number itself where there is none."""

    step: int
    """How many batches the policy that it was measured of had been trained on."""
    value: float
    low: float
    high: float


class AccuracyChange(NamedTuple):
    """The change of an accuracy over the same prompts, with its paired interval."""

    since: int
    """Batches trained on before the evaluation that it is compared with."""
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEvaluation:
    """The numbers of one evaluation of one set."""

    step: int
    """Batches trained on before it."""
    accuracy: float | None
    """Share of right answers; None where nothing could be scored."""
    low: float
    """Of the accuracy's interval, as is ``high``."""
    high: float
    reward_mean: float | None
    response_length_mean: float | None
    """In tokens."""
    truncated_ratio: float | None
    num_prompts: int
    num_failed: int
    change: AccuracyChange | None = None
    """Since the first evaluation; None for that itself, and where it asked something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The curves by which a run shows how it learns, each in the order of steps."""

    evaluations: Mapping[str, tuple[SetEvaluation, ...]]
    """By name of the set."""
    reward: tuple[Point, ...]
    """Mean reward of a batch; as the others, of the policy that began to make it."""
    response_length: tuple[Point, ...]
    """Mean of a batch, in tokens."""
    entropy: tuple[Point, ...]
    """Mean over trained tokens, in nats."""
    mismatch: tuple[Point, ...]
    """KL divergence between engine and trainer, mean over trained tokens, in nats."""
    loss: tuple[Point, ...] = ()
    """Of answers that were given and not sampled: cross entropy, mean over learned tokens, in nats."""

    @property
    def of_training(self) -> tuple[str, tuple[Point, ...]]:
        """Name and return the curve of the batches: the loss where answers were given, else the reward."""
        return ("loss", self.loss) if self.loss else ("reward", self.reward)

    def accuracy(self, name: str) -> tuple[Point, ...]:
        """Return the accuracy on a set with its interval, where there is one."""
        return tuple(
            Point(each.step, each.accuracy, each.low, each.high)
            for each in self.evaluations[name]
            if each.accuracy is not None
        )

    def change(self, name: str) -> AccuracyChange | None:
        """Return how the accuracy on a set has changed from the first evaluation to the last; None where unknown."""
        found = self.evaluations[name]
        return found[-1].change if found else None

    def overall_accuracy(self) -> tuple[Point, ...]:
        """Return the accuracy on the only set, or the mean of several sets, each counted once, without an interval."""
        if len(self.evaluations) == 1:
            (name,) = self.evaluations
            return self.accuracy(name)
        by_step: dict[int, list[float]] = {}
        for name in self.evaluations:
            for point in self.accuracy(name):
                by_step.setdefault(point.step, []).append(point.value)
        return tuple(_point(step, fmean(by_step[step])) for step in sorted(by_step))

    @property
    def num_batches(self) -> int:
        """Return how far the curves go, in batches."""
        last = [curve[-1].step for curve in (self.reward, self.entropy) if curve]
        evaluated = [found[-1].step for found in self.evaluations.values() if found]
        return max([*(step + 1 for step in last), *evaluated], default=0)


def curves_of(
    *,
    evaluations: Iterable[Mapping[str, Any]],
    trained: Iterable[Mapping[str, Any]] = (),
    metrics: Iterable[Mapping[str, Any]] = (),
) -> Curves:
    """Return the curves of records as the logs have them: of eval.jsonl, train.jsonl and metrics.jsonl."""
    by_set: dict[str, dict[int, SetEvaluation]] = {}
    for record in evaluations:
        for name, found in record["sets"].items():
            change = record.get("change", {}).get(name)
            by_set.setdefault(name, {})[record["step"]] = _set_evaluation(record["step"], found, change)
    trained, metrics = tuple(trained), tuple(metrics)
    given = [record for record in trained if _MISMATCH not in record]  # without an update there is no loss either
    return Curves(
        evaluations={name: tuple(found[step] for step in sorted(found)) for name, found in by_set.items()},
        reward=_series(metrics, "rollout/reward_mean"),
        response_length=_series(metrics, "rollout/response_length_mean"),
        entropy=_series(trained, "train/entropy"),
        mismatch=_series(trained, _MISMATCH),
        loss=_series(given, "train/loss"),
    )


def _set_evaluation(step: int, found: Mapping[str, Any], change: Mapping[str, Any] | None) -> SetEvaluation:
    accuracy = _number(found["accuracy"])
    return SetEvaluation(
        step=step,
        accuracy=accuracy,
        low=found["accuracy_low"],
        high=found["accuracy_high"],
        reward_mean=_number(found["reward_mean"]),
        response_length_mean=_number(found["response_length_mean"]),
        truncated_ratio=_number(found["truncated_ratio"]),
        num_prompts=found["num_prompts"],
        num_failed=found["num_failed"],
        change=None
        if change is None
        else AccuracyChange(*(change[name] for name in ("since", "accuracy", "low", "high"))),
    )


def _series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[Point, ...]:
    found = {record["step"]: value for record in records if (value := _number(record.get(key))) is not None}
    return tuple(_point(step, found[step]) for step in sorted(found))


def _point(step: int, value: float) -> Point:
    return Point(step, value, value, value)


def _number(value: float | None) -> float | None:
    # Also false for a value that is not a number.
    return float(value) if value is not None and -_LARGEST < value < _LARGEST else None
