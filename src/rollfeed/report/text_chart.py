"""Charts of characters, for terminals and logs.

A curve is drawn in dots of braille, two across and four down a character; its interval is a bar at a point.

Axes: C columns of dots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.report.axes import Axis, share_axis, step_axis, value_axis
from rollfeed.report.curves import AccuracyChange, Curves, Point

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column within a character
_BAR_DISTANCE = 3  # columns of dots that stay free between the bars of two intervals
_LEAST_WIDTH = 24
_REPORT_WIDTH, _REPORT_HEIGHT = 64, 10


def text_chart(
    points: Sequence[Point], *, width: int, height: int, num_batches: int, shares: bool, ascii_only: bool = False
) -> list[str]:
    """Return a curve as ``height`` lines, axis included, none longer than ``width``; nothing where there is no room.

    Two lines are the axis, which ends at ``num_batches``, and its numbers. ``shares`` are values of 0 to 1;
    ``ascii_only`` is for terminals that have no other characters.
    """
    numbers = [number for point in points for number in (point.value, point.low, point.high)]
    values = share_axis(numbers, num_ticks=3) if shares else value_axis(numbers, num_ticks=3)
    rows = height - 2
    margin = max(map(len, values.labels))
    columns = width - margin - 2
    if rows < 2 or width < _LEAST_WIDTH:
        return []
    steps = step_axis(max(num_batches, points[-1].step if points else 0))
    cells = _cells(points, values, steps, rows=rows, columns=columns, ascii_only=ascii_only)
    labels = _row_labels(values, rows)
    tick, side, corner, floor = "||+-" if ascii_only else "┤│└─"
    lines = [f"{labels[row]:>{margin}} {tick if labels[row] else side}{''.join(cells[row])}" for row in range(rows)]
    last = f"{steps.high:.0f}"
    below = f"{' ' * margin}  0{'batches':^{columns - 1 - len(last)}}{last}"
    return [line.rstrip() for line in (*lines, f"{' ' * margin} {corner}{floor * columns}", below)]


def accuracy_report(curves: Curves, *, width: int = _REPORT_WIDTH, ascii_only: bool = False) -> list[str]:
    """Return lines that show the accuracy by batches: :func:`accuracy_lines`, and a chart of the mean over the sets.

    Nothing is returned where nothing was evaluated.
    """
    points = curves.overall_accuracy()
    if not points:
        return []
    chart = text_chart(
        points,
        width=min(width, _REPORT_WIDTH),
        height=_REPORT_HEIGHT,
        num_batches=curves.num_batches,
        shares=True,
        ascii_only=ascii_only,
    )
    return [*accuracy_lines(curves), *chart]


def accuracy_lines(curves: Curves) -> list[str]:
    """Return a title, and for each set its first and last accuracy and the change over the same prompts."""
    of_sets = [
        f"{name}: {change_text(found)}{paired_text(curves.change(name))}"
        for name in curves.evaluations
        if (found := curves.accuracy(name))
    ]
    if len(of_sets) > 1:
        of_sets.append(f"mean of {len(of_sets)} sets: {change_text(curves.overall_accuracy())}")
    return ["held-out accuracy by batches trained on", *(f"  {line}" for line in of_sets)]


def change_text(points: Sequence[Point]) -> str:
    """Return the first and the last value of an accuracy, the latter with its interval."""
    first, last = points[0], points[-1]
    interval = f" ({last.low:.3f} to {last.high:.3f})" if last.low < last.high else ""
    return f"{first.value:.3f}{f' -> {last.value:.3f}' if len(points) > 1 else ''}{interval}"


def paired_text(change: AccuracyChange | None) -> str:
    """Return by how much an accuracy has changed over the same prompts, with its interval; nothing where unknown."""
    return "" if change is None else f", change {change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"


def _cells(
    points: Sequence[Point], values: Axis, steps: Axis, *, rows: int, columns: int, ascii_only: bool
) -> list[list[str]]:
    """Return the characters of the plot, by row from the top."""
    cells = [[" "] * columns for _ in range(rows)]
    if not points:
        return cells
    num_columns = 2 * columns
    line = _line(_by_column(points, values, steps, num_columns), rows)
    bars = _bars(points, values, steps, rows=rows, num_columns=num_columns)
    patterns: dict[tuple[int, int], int] = {}
    for dot, column in line | bars:
        cell = (dot // 4, column // 2)
        patterns[cell] = patterns.get(cell, 0) | _DOTS[dot % 4][column % 2]
    for (row, column), pattern in patterns.items():
        cells[row][column] = "." if ascii_only else chr(_BRAILLE | pattern)
    for dot, column in line:
        if ascii_only or len(points) == 1:  # a dot alone would not be seen
            cells[dot // 4][column // 2] = "*" if ascii_only else "•"
    return cells


def _by_column(points: Sequence[Point], values: Axis, steps: Axis, num_columns: int) -> NDArray[np.float64]:
    """Return how high the curve is, 0 to 1 ``(C,)``: the mean of a column's points, a line between, NaN outside."""
    places = np.array([_column(point, steps, num_columns) for point in points])
    shares = np.array([values.share(point.value) for point in points])
    taken = np.unique(places)
    means = np.array([shares[places == place].mean() for place in taken])
    share_C: NDArray[np.float64] = np.interp(np.arange(num_columns), taken, means, left=np.nan, right=np.nan)
    return share_C


def _column(point: Point, steps: Axis, num_columns: int) -> int:
    return round(steps.share(point.step) * (num_columns - 1))


def _line(share_C: NDArray[np.float64], rows: int) -> frozenset[tuple[int, int]]:
    """Return the dots of a line as row and column; its parts touch each other."""
    found: set[tuple[int, int]] = set()
    before: int | None = None
    for column in np.flatnonzero(~np.isnan(share_C)):
        place = _row(share_C[column], 4 * rows)
        start = place if before is None or before == place else before + (1 if place > before else -1)
        found |= {(dot, int(column)) for dot in range(min(start, place), max(start, place) + 1)}
        before = place
    return frozenset(found)


def _bars(
    points: Sequence[Point], values: Axis, steps: Axis, *, rows: int, num_columns: int
) -> frozenset[tuple[int, int]]:
    """Return the dots of the intervals, a bar each; where they would touch, of the later points."""
    found: set[tuple[int, int]] = set()
    free = num_columns
    for point in reversed(points):
        column = _column(point, steps, num_columns)
        if column < free and point.low < point.high:
            top, bottom = (_row(values.share(end), 4 * rows) for end in (point.high, point.low))
            found |= {(dot, column) for dot in range(top, bottom + 1)}
            free = column - _BAR_DISTANCE
    return frozenset(found)


def _row(share: float, num_rows: int) -> int:
    """Return the row from the top, of so many, that a share of the height is in."""
    return min(num_rows - 1, max(0, int((1.0 - share) * num_rows)))


def _row_labels(axis: Axis, rows: int) -> list[str]:
    """Return what is written beside each row: the axis' ticks, those of the ends first."""
    labels = [""] * rows
    numbered = list(zip(axis.ticks, axis.labels, strict=True))
    for tick, label in (numbered[0], numbered[-1], *numbered[1:-1]):
        row = _row(axis.share(tick), rows)
        if not labels[row]:
            labels[row] = label
    return labels
