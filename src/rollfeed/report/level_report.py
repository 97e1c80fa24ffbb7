"""Difficulty and accuracy of environments over a run: as characters, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from rollfeed.base.atomic import replace_file
from rollfeed.report.axes import number_text, share_axis, value_axis
from rollfeed.report.curves import Point
from rollfeed.report.files import import_drawing, write_page
from rollfeed.report.level_curves import EnvironmentCurves, last_step, mean_curves
from rollfeed.report.page import NUM_COLOURS, Line, document, section
from rollfeed.report.text_chart import text_chart

_WIDTH, _HEIGHT, _SIZE = 64, 9, (720, 300)
_HARDEST, _ACCURACY = "hardest level", "accuracy in training"


def difficulty_lines(curves: Mapping[str, EnvironmentCurves], *, width: int, ascii_only: bool = False) -> Iterator[str]:
    """Yield a line an environment, and charts of the means over them by batches."""
    for name, each in curves.items():
        yield f"{name}: level {_change(each.difficulty)}, accuracy {_change(each.accuracy)}"
    means, num_batches = mean_curves(curves), last_step(curves)
    of = f", mean of {len(curves)} environments" if len(curves) > 1 else ""
    for title, points, are_shares in ((_HARDEST, means.difficulty, False), (_ACCURACY, means.accuracy, True)):
        yield f"{title}{of}"
        yield from text_chart(
            points,
            width=min(width, _WIDTH),
            height=_HEIGHT,
            num_batches=num_batches,
            shares=are_shares,
            ascii_only=ascii_only,
        )


def write_difficulty(directory: Path, curves: Mapping[str, EnvironmentCurves], *, title: str) -> Iterator[Path]:
    """Write difficulty.html, and with matplotlib difficulty.png, and yield what was written."""
    text = document(title, [f"<h1>{escape(title)}</h1>", *_sections(curves)])
    write_page(directory / "difficulty.html", text)
    yield directory / "difficulty.html"
    picture, _ = import_drawing()
    if picture is not None:
        replace_file(
            directory / "difficulty.png", lambda file: picture.draw_environments(curves, title=title, file=file)
        )
        yield directory / "difficulty.png"


def _sections(curves: Mapping[str, EnvironmentCurves]) -> Iterator[str]:
    for place, title in enumerate((_HARDEST, _ACCURACY)):
        lines = [
            Line(name, each[place], f"c{number % NUM_COLOURS}") for number, (name, each) in enumerate(curves.items())
        ]
        values = [point.value for line in lines for point in line.points]
        yield from section(
            title.capitalize(),
            lines,
            values=value_axis(values, least_step=1.0) if title is _HARDEST else share_axis(values),
            num_batches=last_step(curves),
            label=f"{title} of each environment by batches trained on; the table has the numbers",
            size=_SIZE,
        )
    yield '<section>\n<h2>Environments</h2>\n<div class="scroll">\n<table>\n<thead><tr>'
    yield f'<th class="name">environment</th><th>{_HARDEST}</th><th>{_ACCURACY}</th></tr></thead>\n<tbody>'
    for name, each in curves.items():
        cells = "".join(f"<td>{_change(points).replace('->', '→')}</td>" for points in each)
        yield f'<tr><td class="name">{escape(name)}</td>{cells}</tr>'
    yield "</tbody>\n</table>\n</div>\n</section>"


def _change(points: tuple[Point, ...]) -> str:
    if not points:
        return "-"
    first, last = (f"{value:g}" if value % 1 == 0 else number_text(value) for value in (points[0][1], points[-1][1]))
    return first if len(points) == 1 else f"{first} -> {last}"
