"""The curves of a run as one HTML file that needs nothing else: no network, no script.

Invariant: every text that comes from a run is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rollfeed.config.settings import flatten
from rollfeed.report.axes import Axis, number_text, share_axis, step_axis, value_axis
from rollfeed.report.curves import Curves, Point, SetEvaluation
from rollfeed.report.text_chart import change_text, paired_text

SETTINGS: tuple[tuple[str, str], ...] = (
    ("model.checkpoint", "model"),
    ("rollout.num_rollout", "batches"),
    ("rollout.rollout_batch_size", "groups a batch"),
    ("rollout.n_samples_per_prompt", "samples a prompt"),
    ("rollout.mode", "mode"),
    ("sampling.rollout_temperature", "temperature"),
    ("sampling.rollout_max_response_len", "response tokens at most"),
    ("train.method", "method"),
    ("advantage.estimator", "advantage"),
    ("train.loss.normalisation", "loss normalised by"),
    ("train.loss.ratio", "ratio"),
    ("train.optimizer.learning_rate", "learning rate"),
    ("seed", "seed"),
)
"""The settings that are shown, by key."""

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c1f23; --soft: #5b636d; --rule: #dfe3e8;
  --c0: #0072b2; --c1: #c04e00; --c2: #00795a; --c3: #a8467c; --c4: #2b7fb8; --c5: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e8eaed; --soft: #a3abb5; --rule: #30363d;
  --c0: #58a6ff; --c1: #ff9d5c; --c2: #3fcf9f; --c3: #e59ac4; --c4: #8cc8f0; --c5: #e6b450; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 60rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1.1rem; }
.result { margin: .25rem 0; font-size: 1.05rem; overflow-wrap: anywhere; }
.keys { display: flex; flex-wrap: wrap; gap: .35rem 1.25rem; margin: 0; padding: 0; list-style: none;
  color: var(--soft); font-size: .9rem; }
.keys b { color: var(--text); font-weight: 600; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .25rem 0; padding: 0; list-style: none; }
.legend li::before { content: ""; display: inline-block; width: 1.4em; height: .25em; margin-right: .5em;
  vertical-align: middle; background: currentColor; border-radius: 1px; }
.legend span { color: var(--text); }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 1.5rem; }
svg { display: block; width: 100%; height: auto; }
.tick { fill: var(--soft); font-size: 13px; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.line polyline { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.line circle { fill: currentColor; } .line circle:hover { stroke: var(--text); stroke-width: 3; }
.plain { color: var(--soft); }
.line .band { fill: currentColor; opacity: .16; } .line .bar { stroke: currentColor; opacity: .4; stroke-width: 4; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th.name, td.name { text-align: left; overflow-wrap: anywhere; }
"""
NUM_COLOURS = 6
"""Of lines: their styles are ``c0`` and so on."""
_COLOUR_STYLE = "".join(f".c{number} {{ color: var(--c{number}); }}\n" for number in range(NUM_COLOURS))
_TALL, _LOW, _SMALL = (720, 340), (720, 240), (360, 210)
_COLUMNS = ("accuracy", "95 % interval", "mean reward", "tokens", "cut off", "prompts", "failed")


def page(curves: Curves, *, title: str, settings: Mapping[str, Any]) -> str:
    """Return the page as HTML. Of ``settings``, those named in :data:`SETTINGS` are shown."""
    parts = [f"<h1>{escape(title)}</h1>", *_results(curves), *_settings(settings)]
    name, points = curves.of_training
    parts += [*_accuracy(curves), *_figure(f"{name.capitalize()} of training", points, curves, size=_LOW)]
    small = [
        *_figure("Tokens a response", curves.response_length, curves, size=_SMALL),
        *_figure("Entropy, nats", curves.entropy, curves, size=_SMALL),
        *_figure("KL of engine and trainer, nats", curves.mismatch, curves, size=_SMALL),
    ]
    parts += ['<div class="small">', *small, "</div>"] if small else []
    parts += _table(curves)
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page of these parts, which are HTML."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}{_COLOUR_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _results(curves: Curves) -> Iterator[str]:
    for name in curves.evaluations:
        if points := curves.accuracy(name):
            yield (
                f'<p class="result">{escape(name)}: accuracy <strong>{change_text(points).replace("->", "→")}</strong>'
                f"{paired_text(curves.change(name))} after {points[-1].step} batches</p>"
            )


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    by_key = flatten(dict(settings))
    found = [(words, value) for key, words in SETTINGS if (value := by_key.get(key)) is not None]
    if found:
        yield '<ul class="keys" aria-label="settings">'
        yield from (f"<li>{words} <b>{escape(str(value))}</b></li>" for words, value in found)
        yield "</ul>"


def _accuracy(curves: Curves) -> Iterator[str]:
    lines = [
        Line(name, curves.accuracy(name), f"c{number % NUM_COLOURS}") for number, name in enumerate(curves.evaluations)
    ]
    points = [point for line in lines for point in line.points]
    if points:
        yield from section(
            "Held-out accuracy, with 95 % intervals",
            lines,
            values=share_axis(number for point in points for number in (point.low, point.high)),
            num_batches=curves.num_batches,
            label="held-out accuracy by batches trained on; the table has the numbers",
            size=_TALL,
        )


def section(
    title: str, lines: Sequence[Line], *, values: Axis, num_batches: int, label: str, size: tuple[int, int]
) -> Iterator[str]:
    """Yield a :func:`chart` with a title, and where there are several lines with their names."""
    yield f"<section>\n<h2>{title}</h2>"
    if len(lines) > 1:
        yield '<ul class="legend">'
        for line in lines:
            yield f'<li class="{line.style}"><span>{escape(line.name)}</span></li>'
        yield "</ul>"
    yield chart(lines, values=values, num_batches=num_batches, label=label, size=size)
    yield "</section>"


def _figure(title: str, points: Sequence[Point], curves: Curves, *, size: tuple[int, int]) -> Iterator[str]:
    if points:
        yield from section(
            title,
            [Line(title, points, "plain")],
            values=value_axis((point.value for point in points), num_ticks=4),
            num_batches=curves.num_batches,
            label=f"{title}: {number_text(points[0].value)} at first, {number_text(points[-1].value)} at last",
            size=size,
        )


def _table(curves: Curves) -> Iterator[str]:
    if not curves.evaluations:
        yield "<p>Nothing was evaluated: the settings have no [eval] sets.</p>"
        return
    yield '<section>\n<h2>Evaluations</h2>\n<div class="scroll">\n<table>\n<thead><tr>'
    yield '<th scope="col">batches</th><th scope="col" class="name">set</th>'
    yield "".join(f'<th scope="col">{column}</th>' for column in _COLUMNS)
    yield "</tr></thead>\n<tbody>"
    rows = [(each.step, name, each) for name, found in curves.evaluations.items() for each in found]
    for step, name, found in sorted(rows, key=lambda row: row[0]):
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(found))
        yield f'<tr><td>{step}</td><td class="name">{escape(name)}</td>{cells}</tr>'
    yield "</tbody>\n</table>\n</div>\n</section>"


def _cells(found: SetEvaluation) -> Iterator[str]:
    scored = found.accuracy is not None
    yield _number(found.accuracy)
    yield f"{number_text(found.low)} to {number_text(found.high)}" if scored else "-"
    yield _number(found.reward_mean)
    yield "-" if found.response_length_mean is None else f"{found.response_length_mean:.1f}"
    yield "-" if found.truncated_ratio is None else f"{found.truncated_ratio:.1%}"
    yield f"{found.num_prompts:,}"
    yield f"{found.num_failed:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else number_text(value)


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

    Lines drawn last are on top; the axis below ends at ``num_batches``. ``label`` says what it shows to people who hear
    the page, ``size`` its width and height in pixels where there is room.
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
