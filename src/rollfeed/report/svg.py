"""Charts as inline SVG: colours come from the page, and every number has a tooltip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rollfeed.report.axes import Axis, number_text, step_axis
from rollfeed.report.curves import Point

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
_MOST_MARKS = 300  # of a curve: a mark at every number of a long one would be a bar


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart."""

    name: str
    points: Sequence[Point]
    style: str
    """Class that gives it its colour."""


def chart(lines: Sequence[Line], *, values: Axis, num_batches: int, label: str, size: tuple[int, int]) -> str:
    """Return an ``<svg>`` of curves by batches trained on.

    Args:
        lines: Those drawn last are on top.
        values: The axis on the left.
        num_batches: Where the axis below ends.
        label: What the chart shows, for people who hear the page.
        size: Width and height in pixels, where it is as wide as that; it fits its place.
    """
    width, height = size
    plot = _Plot(
        values=values, steps=step_axis(num_batches, num_ticks=6 if width > 500 else 4), width=width, height=height
    )
    parts = [*plot.axes()]
    for line in lines:
        parts += [f'<g class="line {line.style}">', *plot.line(line), "</g>"]
    drawn = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">\n{drawn}\n</svg>'


@dataclass(frozen=True, slots=True)
class _Plot:
    values: Axis
    steps: Axis
    width: int
    height: int

    def x(self, step: float) -> str:
        return f"{_LEFT + self.steps.share(step) * (self.width - _LEFT - _RIGHT):.1f}"

    def y(self, value: float) -> str:
        return f"{_TOP + (1.0 - self.values.share(value)) * (self.height - _TOP - _BOTTOM):.1f}"

    def axes(self) -> Iterator[str]:
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        for tick, label in zip(self.values.ticks, self.values.labels, strict=True):
            y = self.y(tick)
            yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
            yield f'<text class="tick" x="{_LEFT - 8}" y="{y}" dy="0.35em" text-anchor="end">{label}</text>'
        yield f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>'
        for tick, label in zip(self.steps.ticks, self.steps.labels, strict=True):
            yield f'<text class="tick" x="{self.x(tick)}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
        middle = (_LEFT + right) / 2
        yield f'<text class="tick" x="{middle}" y="{self.height - 6}" text-anchor="middle">batches trained on</text>'

    def line(self, line: Line) -> Iterator[str]:
        points = line.points
        if any(point.low < point.high for point in points):
            edge = [(point.step, point.high) for point in points]
            edge += [(point.step, point.low) for point in reversed(points)]
            yield f'<polygon class="band" points="{self._places(edge)}"/>'
        yield f'<polyline points="{self._places([(point.step, point.value) for point in points])}"/>'
        every = -(-len(points) // _MOST_MARKS) or 1
        for point in points[::every]:
            if len(points) == 1 and point.low < point.high:
                yield f'<path class="bar" d="M{self.x(point.step)} {self.y(point.low)}V{self.y(point.high)}"/>'
            yield (
                f'<circle cx="{self.x(point.step)}" cy="{self.y(point.value)}" r="{4 if every == 1 else 2}">'
                f"<title>{escape(_tooltip(line.name, point))}</title></circle>"
            )

    def _places(self, edge: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in edge)


def _tooltip(name: str, point: Point) -> str:
    interval = f" ({number_text(point.low)} to {number_text(point.high)})" if point.low < point.high else ""
    return f"{name} after {point.step} batches: {number_text(point.value)}{interval}"
