"""Several runs as `rollfeed show` prints them: a list, or side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rollfeed.cli.shown import cut_start, duration_text, fitted, json_text, number_text, print_line, print_table
from rollfeed.config import stored_values
from rollfeed.errors import RunDirectoryError
from rollfeed.store import RunReader
from rollfeed.types.text import counted

_KEY_WIDTH = 26
_LEAST_WIDTH = 11
_GAP = 2
_RIGHT_OF_NAMES = (58, 36, 0)  # with all columns, with status, steps and reward, and with none
_FIGURES = (
    ("status", "status", ""),
    ("steps", "steps", ","),
    ("samples", "samples", ","),
    ("reward, first batch", "first_reward", ".4f"),
    ("reward, last batch", "reward", ".4f"),
    ("right, last batch", "correct", ".1%"),
    ("held-out, first", "first_accuracy", ".1%"),
    ("held-out, last", "accuracy", ".1%"),
    ("loss, last batch", "loss", ".4f"),
    ("tokens a response", "length", ".1f"),
    ("cut off, last batch", "truncated", ".1%"),
    ("tokens to train on", "response_tokens", ","),
    ("tokens wasted", "wasted_tokens", ","),
    ("tokens a second", "tokens_per_second", ".0f"),
    ("seconds", "seconds", ".0f"),
)
"""How a figure is called for people and in JSON, and its form; it is that of the last batch or evaluation."""


def print_runs(to: Console, folder: Path, lines: Sequence[Mapping[str, Any]], *, limit: int) -> None:
    """Print a line a run or evaluation; of more than ``limit`` those that changed last."""
    newest = sorted(lines, key=lambda each: each.get("changed") or 0.0)[-limit:]
    names = _told_apart([each["name"] for each in lines], to.width)
    rows = [
        (
            names[each["name"]],
            each["status"] if each["kind"] != "evaluation" else each["kind"],
            *(number_text(each.get("steps"), ","), _change(each.get("first_reward"), each.get("reward"))),
            number_text(each.get("accuracy"), ".1%"),
            "-" if each.get("seconds") is None else duration_text(each["seconds"]),
        )
        for each in lines
        if each in newest
    ]
    print_table(to, ("run", "status", "steps", "reward", "held-out", "took"), rows, left=("run", "status"))
    for each in lines:
        if told := each.get("problem") or each.get("cause"):
            print_line(to, f"{each['name']}: {each['status']}: {told}")
    more = f", the newest {limit} of them shown: --limit {len(lines)}" if len(lines) > limit else ""
    compared = "; --compare shows them side by side" if len(lines) > 1 else ""
    print_line(to, f"{counted(len(lines), 'run')} in {folder}{more}{compared}")


def _told_apart(names: Sequence[str], width: int) -> dict[str, str]:
    """Return names cut to what leaves room for most columns at their right, while no two are the same."""
    found: dict[str, str] = {}
    for others in _RIGHT_OF_NAMES:
        found = {name: cut_start(name, max(width - others, 12)) for name in names}
        if len(set(found.values())) == len(found):
            break
    return found


def _change(first: float | None, last: float | None) -> str:
    return "-" if last is None else f"{number_text(first, '.3f')} -> {number_text(last, '.3f')}"


def comparison_view(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what runs have come to, and the settings in which they differ, each with its value in every run.

    Of a table of settings that a run does not have there is only whether it is ``set``. A run that cannot be read has a
    ``problem`` and no figures.
    """
    found = [_read(path) for path in paths]
    trees = [settings for _, settings in found]
    differing: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree.get(key) for tree in trees]
        if all(each == values[0] for each in values):
            continue
        table = next((part for part in _tables(key) if any(not _has(tree, part) for tree in trees if tree)), None)
        if table is not None:
            key, values = table, ["set" if _has(tree, table) else None for tree in trees]
        differing[key] = values
    return {"runs": [figures for figures, _ in found], "settings": differing}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a run, and its settings by dotted key."""
    from rollfeed.viewer.found_runs import list_line  # which takes a while

    line = list_line(str(path), path)
    figures = {"directory": str(path), "problem": line.get("problem") or line.get("cause")}
    figures |= {name: line.get(name) for _, name, _ in _FIGURES}
    try:
        with RunReader(path) as reader:
            return figures, stored_values(reader.run().settings)
    except RunDirectoryError:
        return figures, {}


def _tables(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _has(tree: Mapping[str, Any], table: str) -> bool:
    return any(key.startswith(f"{table}.") for key in tree)


def print_comparison(to: Console, paths: Sequence[Path]) -> None:
    """Print runs side by side: settings that differ, then figures; several tables where they are too many for one."""
    view = comparison_view(paths)
    rows = [
        *((key, [_value(each) for each in values]) for key, values in view["settings"].items()),
        *((words, [_figure(each[name], form) for each in view["runs"]]) for words, name, form in _FIGURES),
    ]
    num_beside = max((to.width - _KEY_WIDTH) // (_LEAST_WIDTH + _GAP), 1)
    for start in range(0, len(paths), num_beside):
        beside = slice(start, start + num_beside)
        names = [Path(each["directory"]).name for each in view["runs"][beside]]
        width = (to.width - _KEY_WIDTH) // len(names) - _GAP
        table = [
            (cut_start(key, _KEY_WIDTH), *(fitted(each, width, is_left=False) for each in cells[beside]))
            for key, cells in rows
            if any(each != "-" for each in cells)
        ]
        print_table(to, ("", *(cut_start(each, width) for each in names)), table, left=("",))
        to.print()
    for each in view["runs"]:
        if each["problem"]:
            print_line(to, f"{each['directory']}: {each['status']}: {each['problem']}")


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json_text(value)


def _figure(value: Any, form: str) -> str:
    return value if isinstance(value, str) else number_text(value, form)
