"""Several runs as `rollfeed show` prints them: a list, or side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from rollfeed.cli.show_run import trained_records
from rollfeed.cli.shown import cut_start, duration_text, fitted, json_text, number_text, print_line, print_table
from rollfeed.config.settings import flatten
from rollfeed.errors import RunDirectoryError, in_one_line
from rollfeed.store import RunReader
from rollfeed.store.layout import JOURNAL
from rollfeed.types.text import counted

_DEPTH = 3
"""Folders below the given one that are looked into for runs."""
_KEY_WIDTH = 26
_LEAST_WIDTH = 11
_GAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of a run; None where it has no such number."""

    directory: str
    status: str
    """``damaged`` where it cannot be read."""
    problem: str | None = None
    """Why it failed, ended early or cannot be read."""
    written: str | None = None
    """When its last step was committed, in local time."""
    seconds: float | None = None
    """Of all steps."""
    steps: int = 0
    samples: int = 0
    reward_first: float | None = None
    """Mean of the first batch."""
    reward_last: float | None = None
    correct_last: float | None = None
    """Share of right answers of the last batch."""
    length_last: float | None = None
    """Tokens of a response of the last batch."""
    truncated_last: float | None = None
    loss_last: float | None = None
    accuracy_first: float | None = None
    """Of the first evaluation."""
    accuracy_last: float | None = None
    response_tokens: int = 0
    """Of groups that were kept."""
    wasted_tokens: int = 0
    tokens_per_second: float | None = None
    """Of the last batch."""


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories in a folder, by name; those in runs are not looked for."""

    def below(path: Path, depth: int) -> Iterator[Path]:
        if (path / JOURNAL).exists():
            yield path
        elif depth:
            for each in sorted(path.glob("[!.]*/")):
                if not each.is_symlink():
                    yield from below(each, depth - 1)

    return list(below(folder, _DEPTH))


def figures_of(path: Path) -> RunFigures:
    """Return what a run has come to; a run that cannot be read says why."""
    try:
        with RunReader(path) as reader:
            return _figures(reader)
    except RunDirectoryError as error:
        return RunFigures(directory=str(path), status="damaged", problem=in_one_line(error))


def _figures(reader: RunReader) -> RunFigures:
    steps, totals, evaluations = reader.steps(), reader.totals(), reader.evaluations()
    first, last = (steps[0].metrics, steps[-1].metrics) if steps else ({}, {})
    accuracies = [each.get("accuracy") for each in evaluations]
    losses = [record["train/loss"] for record in trained_records(reader) if record.get("train/loss") is not None]
    seconds = [each.metrics.get("time/total_seconds", each.metrics.get("perf/step_seconds", 0.0)) for each in steps]
    written = datetime.fromtimestamp((reader.path / JOURNAL).stat().st_mtime).astimezone()
    return RunFigures(
        directory=str(reader.path),
        status=reader.status(),
        problem=reader.run().cause,
        written=written.isoformat(" ", "seconds"),
        seconds=sum(seconds) if steps else None,
        steps=totals.num_steps,
        samples=totals.num_samples,
        reward_first=first.get("rollout/reward_mean"),
        reward_last=last.get("rollout/reward_mean"),
        correct_last=last.get("rollout/correct_ratio"),
        length_last=last.get("rollout/response_length_mean"),
        truncated_last=last.get("rollout/truncated_ratio"),
        loss_last=losses[-1] if losses else None,
        accuracy_first=accuracies[0] if accuracies else None,
        accuracy_last=accuracies[-1] if accuracies else None,
        response_tokens=totals.response_tokens,
        wasted_tokens=totals.wasted_tokens,
        tokens_per_second=last.get("perf/tokens_per_second"),
    )


def print_runs(to: Console, folder: Path, runs: Sequence[RunFigures], *, limit: int) -> None:
    """Print a line a run; of more than ``limit`` those that were written last."""
    newest = sorted(runs, key=lambda each: each.written or "")[-limit:]
    rows = [
        (
            cut_start(str(Path(each.directory).relative_to(folder)), max(to.width - 58, 12)),
            *(each.status, str(each.steps), _change(each.reward_first, each.reward_last)),
            number_text(each.accuracy_last, ".1%"),
            "-" if each.seconds is None else duration_text(each.seconds),
        )
        for each in runs
        if each in newest
    ]
    print_table(to, ("run", "status", "steps", "reward", "held-out", "took"), rows, left=("run", "status"))
    for each in runs:
        if each.problem:
            print_line(to, f"{each.directory}: {each.status}: {each.problem}")
    more = f", the newest {limit} of them shown: --limit {len(runs)}" if len(runs) > limit else ""
    print_line(to, f"{counted(len(runs), 'run')} in {folder}{more}; --compare shows them side by side")


def _change(first: float | None, last: float | None) -> str:
    return "-" if last is None else f"{number_text(first, '.3f')} -> {number_text(last, '.3f')}"


def comparison_view(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what runs have come to, and the settings in which they differ, each with its value in every run."""
    return {"runs": [asdict(figures_of(path)) for path in paths], "settings": _differences(paths)}


def _differences(paths: Sequence[Path]) -> dict[str, list[Any]]:
    """Return settings that differ; of a table that a run does not have, only whether it is ``set``."""
    trees = [dict(_settings(path)) for path in paths]
    differing: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for tree in trees for key in flatten(tree)):
        parts = key.split(".")
        for end in range(1, len(parts) + 1):
            found = [_entry(tree, parts[:end]) for tree in trees]
            if any(each is None for each in found) or end == len(parts):
                break
        values = ["set" if isinstance(each, Mapping) else each for each in found]
        if any(each != values[0] for each in values):
            differing[".".join(parts[:end])] = values
    return differing


def _entry(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _settings(path: Path) -> Mapping[str, Any]:
    with RunReader(path) as reader:
        return reader.run().settings


def print_comparison(to: Console, paths: Sequence[Path]) -> None:
    """Print runs side by side: settings that differ, then figures; several tables where they are too many for one."""
    view = comparison_view(paths)
    num_beside = max((to.width - _KEY_WIDTH) // (_LEAST_WIDTH + _GAP), 1)
    rows = [
        *((key, [_value(each) for each in values]) for key, values in view["settings"].items()),
        *((words, [_figure(each, name, form) for each in view["runs"]]) for words, name, form in _FIGURES),
    ]
    names = [Path(each["directory"]).name for each in view["runs"]]
    for start in range(0, len(paths), num_beside):
        beside = slice(start, start + num_beside)
        width = (to.width - _KEY_WIDTH) // len(names[beside]) - _GAP
        table = [
            (cut_start(key, _KEY_WIDTH), *(fitted(each, width, is_left=False) for each in values[beside]))
            for key, values in rows
            if any(each != "-" for each in values)
        ]
        print_table(to, ("", *(cut_start(each, width) for each in names[beside])), table, left=("",))
        to.print()
    for each in view["runs"]:
        if each["problem"]:
            print_line(to, f"{each['directory']}: {each['status']}: {each['problem']}")


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json_text(value)


def _figure(figures: Mapping[str, Any], name: str, form: str) -> str:
    value = figures[name]
    return value if isinstance(value, str) else number_text(value, form)


_FIGURES = (
    ("status", "status", ""),
    ("steps", "steps", ","),
    ("reward, first batch", "reward_first", ".4f"),
    ("reward, last batch", "reward_last", ".4f"),
    ("right, last batch", "correct_last", ".1%"),
    ("held-out, first", "accuracy_first", ".1%"),
    ("held-out, last", "accuracy_last", ".1%"),
    ("loss, last batch", "loss_last", ".4f"),
    ("tokens a response", "length_last", ".1f"),
    ("cut off, last batch", "truncated_last", ".1%"),
    ("tokens to train on", "response_tokens", ","),
    ("tokens wasted", "wasted_tokens", ","),
    ("tokens a second", "tokens_per_second", ".0f"),
    ("seconds", "seconds", ".0f"),
)
