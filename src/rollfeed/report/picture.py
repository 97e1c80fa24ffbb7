"""Curves as a PNG: of a run that trains, the accuracy with its interval and the reward below; of environments."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D

from rollfeed.report.axes import Axis, share_axis, step_axis, value_axis
from rollfeed.report.curves import Curves, Point
from rollfeed.report.level_curves import EnvironmentCurves, last_step

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Told apart by people who do not see red or green. Source: Okabe and Ito, "Color Universal Design" (2008)."""
_REWARD_COLOUR = "#555555"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":")
_FONT = "DejaVu Sans"  # comes with matplotlib, so that pictures are alike everywhere
_STYLE: dict[Any, Any] = {
    "font.family": _FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.labelsize": 11,
    "axes.titlesize": 14,
}
_TITLE_CHARACTERS, _NAME_CHARACTERS = 60, 40
_NUM_WITH_MARKS = 60  # longer curves have no room for a mark at every number


def draw(curves: Curves, *, title: str, file: IO[bytes]) -> None:
    """Write a PNG of 1350 x 1050 pixels; without evaluations it has the reward alone."""
    parts: list[tuple[int, Callable[[Axes], None]]] = []
    if curves.evaluations:
        accuracies = {name: curves.accuracy(name) for name in curves.evaluations}
        parts.append(
            (3, partial(_draw_lines, lines=accuracies, label="held-out accuracy", legend="with 95 % intervals"))
        )
    if curves.reward or not curves.evaluations:
        parts.append((2, partial(_draw_training, curves=curves)))
    _draw_parts(parts, title=title, num_batches=curves.num_batches, file=file)


def draw_environments(curves: Mapping[str, EnvironmentCurves], *, title: str, file: IO[bytes]) -> None:
    """Write a PNG of the same size: the hardest level of each environment, and its accuracy below."""
    levels, accuracies = ({name: each[place] for name, each in curves.items()} for place in (0, 1))
    parts = [
        (1, partial(_draw_lines, lines=levels, label="hardest level", are_shares=False)),
        (1, partial(_draw_lines, lines=accuracies, label="accuracy in training", has_legend=False)),
    ]
    _draw_parts(parts, title=title, num_batches=last_step(curves), file=file)


def _draw_parts(
    parts: Sequence[tuple[int, Callable[[Axes], None]]], *, title: str, num_batches: int, file: IO[bytes]
) -> None:
    with matplotlib.rc_context():
        # A person's own defaults could ask for what is not here, such as LaTeX.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(9, 7), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.suptitle(_drawable(title, _TITLE_CHARACTERS), parse_math=False, fontsize=14, fontweight="bold")
        axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=[share for share, _ in parts])
        for place, (_, draw_part) in zip(axes[:, 0], parts, strict=True):
            draw_part(place)
        lowest, steps = axes[-1, 0], step_axis(num_batches)
        lowest.set_xlim(-0.01 * steps.high, steps.high * 1.01)
        lowest.set_xticks(steps.ticks, steps.labels)
        lowest.set_xlabel("batches trained on")
        figure.savefig(file, format="png")


def _draw_lines(
    axes: Axes,
    *,
    lines: Mapping[str, Sequence[Point]],
    label: str,
    legend: str | None = None,
    has_legend: bool = True,
    are_shares: bool = True,
) -> None:
    handles: list[Line2D] = []
    names: list[str] = []
    drawn: list[Point] = []
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        style = _DASHES[number // len(COLOURS) % len(_DASHES)]
        at, lows, highs = ([point[field] for point in points] for field in (0, 2, 3))
        if len(points) == 1:  # a band would have no width
            axes.vlines(at, lows, highs, color=colour, alpha=0.4, linewidth=4)
        axes.fill_between(at, lows, highs, color=colour, alpha=0.18, linewidth=0)
        handles += axes.plot(*_xy(points), color=colour, linestyle=style, marker=_mark(points), linewidth=2)
        names.append(_drawable(name, _NAME_CHARACTERS))
        drawn += points
    axes.set_ylabel(label)
    ends = [number for point in drawn for number in (point.low, point.high)]
    _set_values(axes, share_axis(ends) if are_shares else value_axis(ends, least_step=1.0))
    if has_legend:
        for text in axes.legend(handles, names, title=legend, frameon=False, loc="best").get_texts():
            text.set_parse_math(False)


def _draw_training(axes: Axes, *, curves: Curves) -> None:
    name, points = curves.of_training
    axes.plot(*_xy(points), color=_REWARD_COLOUR, marker=_mark(points), markersize=4, linewidth=1.5)
    axes.set_ylabel(f"mean {name} of a batch")
    _set_values(axes, value_axis(point.value for point in points))


def _set_values(axes: Axes, axis: Axis) -> None:
    margin = 0.02 * (axis.high - axis.low)
    axes.set_ylim(axis.low - margin, axis.high + margin)
    axes.set_yticks(axis.ticks, axis.labels)


def _xy(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [point.step for point in points], [point.value for point in points]


def _mark(points: Sequence[Point]) -> str:
    return "o" if len(points) <= _NUM_WITH_MARKS else ""


def _drawable(text: str, num_characters: int) -> str:
    """Return text on one line that the font has characters for, cut where it is long."""
    line = "".join(
        " "
        if unicodedata.category(character).startswith("C")
        else character
        if ord(character) in _characters()
        else "?"
        for character in text
    )
    line = line if len(line) <= num_characters else f"{line[: num_characters - 1]}…"
    # matplotlib leaves names that begin with an underscore out of legends.
    return f" {line}" if line.startswith("_") else line


@cache
def _characters() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family=_FONT))).get_charmap())
