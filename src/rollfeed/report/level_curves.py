"""Curves of environments whose difficulty adapts, made from the states that a run's steps left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from rollfeed.report.curves import Point


class EnvironmentCurves(NamedTuple):
    """The curves of one environment, in the order of steps."""

    difficulty: tuple[Point, ...]
    """The hardest level that problems are made at."""
    accuracy: tuple[Point, ...]
    """Share of right answers at all levels since the point before; none where there were no answers."""


def environment_curves(states: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, EnvironmentCurves]:
    """Return the curves of all environments, by name.

    Args:
        states: Of a source of adaptive environments, each behind the number of batches that it comes after.
    """
    levels: dict[str, list[Point]] = {}
    accuracies: dict[str, list[Point]] = {}
    before: dict[str, tuple[int, int]] = {}
    for step, state in states:
        judged_at, correct_at = (state["columns"].index(name) for name in ("num_judged", "num_correct"))
        for name, environment in state["environments"].items():
            difficulty = environment["difficulty"]
            rows = difficulty["levels"]
            judged, correct = sum(row[judged_at] for row in rows), sum(row[correct_at] for row in rows)
            known = before.get(name, (0, 0))
            if judged < known[0]:  # another version of it, of which nothing was known
                known = (0, 0)
            before[name] = judged, correct
            levels.setdefault(name, []).append(_point(step, difficulty["policy"]["level"]))
            if judged > known[0]:
                share = (correct - known[1]) / (judged - known[0])
                accuracies.setdefault(name, []).append(_point(step, share))
    return {name: EnvironmentCurves(tuple(found), tuple(accuracies.get(name, ()))) for name, found in levels.items()}


def mean_curves(curves: Mapping[str, EnvironmentCurves]) -> EnvironmentCurves:
    """Return the means over environments, each counted once."""
    means = []
    for of_environments in zip(*curves.values(), strict=True):
        by_step: dict[int, list[float]] = {}
        for points in of_environments:
            for point in points:
                by_step.setdefault(point.step, []).append(point.value)
        means.append(tuple(_point(step, fmean(by_step[step])) for step in sorted(by_step)))
    return EnvironmentCurves(*means)


def last_step(curves: Mapping[str, EnvironmentCurves]) -> int:
    """Return how far the curves go, in batches."""
    return max(each.difficulty[-1].step for each in curves.values())


def _point(step: int, value: float) -> Point:
    return Point(step, value, value, value)
