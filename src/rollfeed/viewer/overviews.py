"""All of a run that is not its samples: status, settings, steps and curves, as JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rollfeed.config import stored_values
from rollfeed.config.settings import flatten
from rollfeed.report import advice_of
from rollfeed.store import RunReader, StepRecord
from rollfeed.types.text import well_formed
from rollfeed.viewer.found_runs import is_evaluation, list_line, read_result, run_line

_MOST_POINTS = 1_000  # of a curve: more than a screen has columns


def overview(name: str, path: Path) -> dict[str, Any]:
    """Return what a page needs to show a run or an evaluation, its samples aside.

    ``curves`` are a list of ``name``, ``x`` (steps, or batches trained on) and ``y``, with ``low`` and ``high`` where
    there are intervals.

    Raises:
        RunDirectoryError: If the run cannot be read.
        DataError: If the evaluation cannot.
    """
    if is_evaluation(path):
        result = read_result(path)
        about = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
        return {**list_line(name, path), "settings": about, "sets": result["sets"], "curves": [], "steps": {}}
    with RunReader(path) as reader:
        record, steps, changes, isolation = reader.run(), reader.steps(), reader.changes(), reader.isolation()
        told = {"name": name, **run_line(reader, steps)}
        evaluations, trained = reader.evaluations(), tuple(reader.updates().values())
    metrics = [{"step": step.step, **step.metrics} for step in steps]
    advice = advice_of(settings=record.settings, metrics=metrics, trained=trained, evaluations=evaluations)
    return {
        **told,
        "directory": well_formed(str(path)),
        "settings": flatten(stored_values(record.settings)),
        "changes": [str(change) for change in changes],
        "isolation": None if isolation is None else str(isolation),
        "ledger": asdict(steps[-1].ledger) if steps else {},
        "steps": _step_columns(steps),
        "curves": [*_accuracies(evaluations), *_series(metrics), *_series(trained)],
        "advice": [each.text for each in advice],
    }


def _step_columns(steps: Sequence[StepRecord]) -> dict[str, list[Any]]:
    return {
        "step": [each.step for each in steps],
        "kept": [each.num_groups for each in steps],
        "dropped": [each.num_dropped for each in steps],
        "reasons": [dict(each.drop_reasons) for each in steps],
        "reward": [_rounded(each.metrics.get("rollout/reward_mean")) for each in steps],
        "correct": [_rounded(each.metrics.get("rollout/correct_ratio")) for each in steps],
        "length": [_rounded(each.metrics.get("rollout/response_length_mean")) for each in steps],
        "truncated": [_rounded(each.metrics.get("rollout/truncated_ratio")) for each in steps],
        "wasted": [sum(each.wasted_tokens.values()) for each in steps],
    }


def _accuracies(evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_set: dict[str, list[tuple[Any, ...]]] = {}
    for each in evaluations:
        for name, found in each["sets"].items():
            if found["accuracy"] is not None:
                ends = (found["accuracy"], found["accuracy_low"], found["accuracy_high"])
                by_set.setdefault(name, []).append((each["step"], *map(_rounded, ends)))
    return [
        dict(zip(("x", "y", "low", "high"), map(list, zip(*points, strict=True)), strict=True))
        | {"name": f"eval/{name}/accuracy"}
        for name, points in by_set.items()
    ]


def _series(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_name: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                by_name.setdefault(name, {})[record["step"]] = value
    return [{"name": name, **_thinned(points)} for name, points in by_name.items()]


def _thinned(points: Mapping[int, float]) -> dict[str, list[Any]]:
    """Return a curve of few enough points: each the mean of some that follow each other."""
    x, y = np.array(list(points)), np.array(list(points.values()), np.float64)
    starts = np.arange(0, len(x), -(-len(x) // _MOST_POINTS) or 1)
    means = np.add.reduceat(y, starts) / np.diff([*starts, len(x)])
    return {"x": x[starts].tolist(), "y": [_rounded(value) for value in means.tolist()]}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
