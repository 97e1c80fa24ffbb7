"""The runs, trainings and evaluations below some folders, and a line of each for a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollfeed.errors import ConfigError, DataError, RollfeedError, in_one_line
from rollfeed.store import RunReader, StepRecord
from rollfeed.store.layout import EVAL_LOG, JOURNAL, RESULT_FILE, STEPS, TRAIN_LOG
from rollfeed.store.lock import is_held
from rollfeed.types.text import well_formed

_DEPTH = 3  # a folder of sweeps has runs at the second level
_WATCHED = (JOURNAL, f"{JOURNAL}-wal", STEPS, TRAIN_LOG, EVAL_LOG, RESULT_FILE)


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the runs and evaluations that folders are, or have in them, by a name for each.

    Raises:
        ConfigError: If a folder is not there, or there is nothing in it.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            told = "is not a directory" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder}: {told}; give a run directory, or a folder of some")
        below = list(_below(folder, _DEPTH))
        if not below:
            raise ConfigError(
                f"{folder}: has no run and no evaluation in it; give the directory that `rollfeed run`, `train` or "
                "`eval` wrote, or a folder of such"
            )
        own = folder.resolve().name or str(folder)
        for path in below:
            parts = [own] * (len(folders) > 1 or path == folder) + list(path.relative_to(folder).parts)
            name = well_formed("/".join(parts))
            found[name if found.get(name, path) == path else well_formed(str(path))] = path
    return found


def is_evaluation(path: Path) -> bool:
    """Whether a folder is what ``rollfeed eval`` wrote."""
    return not (path / JOURNAL).exists() and (path / RESULT_FILE).exists()


def version_of(path: Path) -> str:
    """Return a text that is another one when a run may have changed; cheap enough to be asked every second."""
    parts = ["held" if is_held(path) else ""]
    for name in _WATCHED:
        with suppress(OSError):  # not there, or gone while it was looked for
            stat = (path / name).stat()
            parts.append(f"{name[0]}{stat.st_mtime_ns:x}.{stat.st_size:x}")
    return "-".join(parts)


def list_line(name: str, path: Path) -> dict[str, Any]:
    """Return what a list says of a run or an evaluation; of one that cannot be read, its problem."""
    try:
        if is_evaluation(path):
            return {"name": name, **_evaluation_line(path)}
        with RunReader(path) as reader:
            return {"name": name, **run_line(reader, reader.steps())}
    except Exception as error:  # whatever is wrong with one, the others are listed
        return {"name": name, "kind": "run", "status": "unreadable", "problem": problem_of(error)}


def run_line(reader: RunReader, steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return what a list or a comparison says of a run with these steps; rewards and such are the last batch's.

    Raises:
        RunDirectoryError: If the run is damaged.
    """
    record, evaluations, path = reader.run(), reader.evaluations(), reader.path
    losses = [loss for each in reader.updates().values() if (loss := each.get("train/loss")) is not None]
    first, last = (steps[0].metrics, steps[-1].metrics) if steps else ({}, {})
    return {
        "kind": "training" if (path / TRAIN_LOG).exists() else "run",
        "status": reader.status(),
        "cause": record.cause,
        "steps": len(steps),
        "samples": sum(step.num_samples for step in steps),
        "seconds": sum(step.seconds for step in steps) if steps else None,
        "first_reward": first.get("rollout/reward_mean"),
        "reward": last.get("rollout/reward_mean"),
        "correct": last.get("rollout/correct_ratio"),
        "first_accuracy": evaluations[0].get("accuracy") if evaluations else None,
        "accuracy": evaluations[-1].get("accuracy") if evaluations else None,
        "loss": losses[-1] if losses else None,
        "length": last.get("rollout/response_length_mean"),
        "truncated": last.get("rollout/truncated_ratio"),
        "response_tokens": sum(step.response_tokens for step in steps),
        "wasted_tokens": sum(sum(step.wasted_tokens.values()) for step in steps),
        "tokens_per_second": last.get("perf/tokens_per_second"),
        "changed": (path / STEPS).stat().st_mtime if (path / STEPS).exists() else None,
    }


def problem_of(error: Exception) -> str:
    """Return what a page says of what went wrong, in one line; of another one than ours its kind, too."""
    return " ".join(str(error).split()) if isinstance(error, RollfeedError) else in_one_line(error)


def read_result(path: Path) -> Mapping[str, Any]:
    """Return the numbers of an evaluation. Raises DataError if its file cannot be read."""
    try:
        result = json.loads((path / RESULT_FILE).read_bytes())
        if not isinstance(result["sets"], dict):
            raise TypeError("its sets are no table")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path / RESULT_FILE}: cannot be read ({in_one_line(error)}); make the evaluation again"
        ) from error
    return dict(result)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    inner: list[Path] = []
    try:
        is_one = (folder / JOURNAL).exists() or is_evaluation(folder)
        if depth and not is_one:
            inner = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:  # it may not be read, or has just gone
        return
    if is_one:
        yield folder
    for each in inner:
        yield from _below(each, depth - 1)


def _evaluation_line(path: Path) -> dict[str, Any]:
    sets = read_result(path)["sets"].values()
    accuracies = [each["accuracy"] for each in sets if each["accuracy"] is not None]
    return {
        "kind": "evaluation",
        "status": "finished",
        "samples": sum(each["num_prompts"] * each["n_samples_per_prompt"] for each in sets),
        "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "changed": (path / RESULT_FILE).stat().st_mtime,
    }
