from __future__ import annotations

import io
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from rollfeed.report import Point
from rollfeed.report.level_curves import EnvironmentCurves, environment_curves, mean_curves
from rollfeed.report.level_report import difficulty_lines, write_difficulty
from rollfeed.report.picture import draw_environments

NASTY = '<script>alert("&")</script> $x^{'
COLUMNS = ["level", "num_groups", "num_judged", "num_correct"]


def state(**environments: tuple[int, list[tuple[int, int, int]]]) -> dict[str, Any]:
    """Return a source's state: by environment its level, and rows of level, judged and right answers."""
    return {
        "columns": COLUMNS,
        "environments": {
            name: {"difficulty": {"policy": {"level": level}, "levels": [[row[0], 0, *row[1:]] for row in rows]}}
            for name, (level, rows) in environments.items()
        },
    }


@pytest.fixture
def curves() -> dict[str, EnvironmentCurves]:
    return environment_curves(
        [
            (1, state(a=(0, []))),
            (2, state(a=(0, [(0, 8, 8)]), b=(3, [(2, 4, 1), (3, 4, 0)]))),
            (5, state(a=(2, [(0, 10, 10), (1, 8, 2)]), b=(2, [(2, 4, 1), (3, 4, 0)]))),
        ]
    )


def pairs(points: Any) -> list[tuple[int, float]]:
    return [point[:2] for point in points]


def test_accuracy_is_that_of_the_answers_since_the_point_before(curves: dict[str, EnvironmentCurves]) -> None:
    assert pairs(curves["a"].difficulty) == [(1, 0), (2, 0), (5, 2)]
    assert pairs(curves["a"].accuracy) == [(2, 1.0), (5, 0.4)]
    assert pairs(curves["b"].difficulty) == [(2, 3), (5, 2)]
    assert pairs(curves["b"].accuracy) == [(2, 0.125)]
    means = mean_curves(curves)
    assert pairs(means.difficulty) == [(1, 0), (2, 1.5), (5, 2)]
    assert pairs(means.accuracy) == [(2, 0.5625), (5, 0.4)]


def test_another_version_of_an_environment_begins_anew() -> None:
    found = environment_curves([(1, state(a=(5, [(5, 40, 40)]))), (2, state(a=(0, [(0, 4, 1)])))])
    assert pairs(found["a"].accuracy) == [(1, 1.0), (2, 0.25)]


def test_a_terminal_shows_a_line_an_environment_and_two_charts(curves: dict[str, EnvironmentCurves]) -> None:
    lines = list(difficulty_lines(curves, width=60, ascii_only=True))
    assert lines[:3] == [
        "a: level 0 -> 2, accuracy 1 -> 0.400",
        "b: level 3 -> 2, accuracy 0.125",
        "hardest level, mean of 2 environments",
    ]
    assert "accuracy in training, mean of 2 environments" in lines
    assert all(len(line) <= 60 and line.isascii() for line in lines)
    assert sum("*" in line for line in lines) > 4
    assert next(iter(difficulty_lines({"a": curves["a"]}, width=10))) == "a: level 0 -> 2, accuracy 1 -> 0.400"


def test_whatever_is_named_is_drawn_and_escaped(curves: dict[str, EnvironmentCurves], tmp_path: Path) -> None:
    found = {NASTY: curves["a"], **{f"e{number}": curves["b"] for number in range(9)}}
    written = list(write_difficulty(tmp_path, found, title=NASTY))
    assert [path.name for path in written] == ["difficulty.html", "difficulty.png"]
    text = written[0].read_text(encoding="utf-8")
    HTMLParser().feed(text)
    assert "<script" not in text
    assert text.count("<polyline") == 2 * len(found)
    assert "<td>0 → 2</td><td>1 → 0.400</td>" in text
    assert imread(written[1]).shape == (1050, 1350, 4)


def test_without_matplotlib_there_is_a_page_only(
    curves: dict[str, EnvironmentCurves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rollfeed.report.picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert list(write_difficulty(tmp_path, curves, title="run")) == [tmp_path / "difficulty.html"]
    assert [path.name for path in tmp_path.iterdir()] == ["difficulty.html"]


@pytest.mark.parametrize("accuracy", [(), (Point(3, 0.5, 0.5, 0.5),)])
def test_little_can_be_drawn(accuracy: Any) -> None:
    file = io.BytesIO()
    found = environment_curves([(3, state(a=(1, [])))])
    draw_environments({"a": found["a"]._replace(accuracy=accuracy)}, title="t", file=file)
    assert file.getvalue()
