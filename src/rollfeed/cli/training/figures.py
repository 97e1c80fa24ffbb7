"""The figures and charts of the live view as lines of text: functions of what is known and of the room there is."""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.report import Curves, change_text, paired_text, text_chart

_WIDE = 96  # columns from which two charts stand side by side
_GAP = 3  # columns between them
_LOWEST_CHART, _HIGHEST_CHART = 6, 11  # lines, without the title


@dataclass(slots=True, kw_only=True)
class Figures:
    """Where training is; the numbers are None until they are known."""

    num_batches: int
    """That the run will have trained on."""
    step: int = 0
    """Batches trained on."""
    reward: float | None = None
    """Mean of the last batch."""
    tokens_per_second: float | None = None
    """Of the last batch."""
    seconds_left: float | None = None
    doing: str = ""
    """What goes on now."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A title and a chart below it."""

    title: str
    lines: list[str]


def figure_lines(figures: Figures, curves: Curves | None) -> list[str]:
    """Return the figures: how far training is and how fast, the held-out accuracy, and what goes on."""
    parts = [f"step {figures.step} of {figures.num_batches}"]
    if figures.reward is not None:
        parts.append(f"reward {figures.reward:.3f}")
    if figures.tokens_per_second is not None:
        parts.append(f"{figures.tokens_per_second:,.0f} tokens/s")
    if figures.seconds_left is not None:
        parts.append(f"{duration_text(figures.seconds_left)} left")
    return [", ".join(parts), *([] if curves is None else _held_out(curves)), figures.doing]


def _held_out(curves: Curves) -> list[str]:
    accuracy = curves.overall_accuracy()
    change = curves.change(next(iter(curves.evaluations))) if len(curves.evaluations) == 1 else None
    lines = [f"held-out accuracy {change_text(accuracy)}"] if accuracy else []
    return [*lines, paired_text(change).removeprefix(", ")] if change else lines


def charts_that_fit(
    curves: Curves | None, *, width: int, height: int, num_batches: int, ascii_only: bool
) -> list[list[Chart]]:
    """Return the charts of accuracy and reward by rows: beside each other, else below, else what there is room for.

    Args:
        curves: None before there are any.
        width: Of the room, in characters.
        height: Of the room, in lines.
        num_batches: Where the charts end.
        ascii_only: For terminals that have no other characters.
    """
    if curves is None:
        return []
    found = [("held-out accuracy", curves.overall_accuracy(), True), ("reward of training", curves.reward, False)]
    shown = [each for each in found if each[1]]
    num_rows = 1 if width >= _WIDE else len(shown)
    while num_rows and height // num_rows - 1 < _LOWEST_CHART:
        num_rows -= 1
    if not num_rows:
        return []
    num_beside = 2 if width >= _WIDE and len(shown) > 1 else 1
    chart_width = (width - _GAP * (num_beside - 1)) // num_beside
    chart_height = min(_HIGHEST_CHART, height // num_rows - 1)
    charts = [
        Chart(
            title,
            text_chart(
                points,
                width=chart_width,
                height=chart_height,
                num_batches=num_batches,
                shares=shares,
                ascii_only=ascii_only,
            ),
        )
        for title, points, shares in shown[: num_rows * num_beside]
    ]
    return [charts[first : first + num_beside] for first in range(0, len(charts), num_beside)]


def duration_text(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
