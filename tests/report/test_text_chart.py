from __future__ import annotations

from random import Random

import pytest

from rollfeed.report import Curves, Point, accuracy_report, change_text, curves_of, text_chart


def point(step: int, value: float, margin: float = 0.0) -> Point:
    return Point(step, value, value - margin, value + margin)


RISING = [point(0, 0.2, 0.1), point(5, 0.6, 0.1), point(10, 0.7, 0.1)]


def test_a_straight_line_goes_from_corner_to_corner() -> None:
    line = [point(0, 0.0), point(10, 1.0)]
    assert text_chart(line, width=30, height=6, num_batches=10, shares=True) == [
        "1.0 ┤                  ⢀⣀⠤⠔⠒⠉⠉",
        "    │            ⢀⣀⠤⠔⠒⠉⠁",
        "0.5 ┤      ⢀⣀⠤⠔⠒⠉⠁",
        "0.0 ┤⣀⣀⠤⠔⠒⠉⠁",
        "    └─────────────────────────",
        "     0       batches        10",
    ]


def test_intervals_are_bars_and_the_axis_goes_on_to_the_end_of_the_run() -> None:
    assert text_chart(RISING, width=32, height=8, num_batches=20, shares=True) == [
        "1.0 ┤",
        "    │      ⢀    ⣀⣀⡇",
        "    │     ⣀⢼⠒⠊⠉⠉  ⠃",
        "0.5 ┤  ⢀⠤⠊ ⠈",
        "    │⡧⠊⠁",
        "0.0 ┤⠃",
        "    └───────────────────────────",
        "     0        batches         20",
    ]


def test_terminals_without_braille_have_stars_and_dots() -> None:
    assert text_chart(RISING, width=32, height=8, num_batches=20, shares=True, ascii_only=True) == [
        "1.0 |",
        "    |      .    ***",
        "    |     ******  .",
        "0.5 |  *** .",
        "    |***",
        "0.0 |.",
        "    +---------------------------",
        "     0        batches         20",
    ]


def test_a_single_point_is_seen() -> None:
    assert text_chart(RISING[:1], width=30, height=7, num_batches=4, shares=True) == [
        "0.3 ┤⡇",
        "    │⡇",
        "0.2 ┤•",
        "    │⡇",
        "0.1 ┤⡇",
        "    └─────────────────────────",
        "     0        batches        4",
    ]


def test_values_that_are_no_shares_have_an_axis_around_them() -> None:
    assert text_chart([point(0, -3.0), point(1, 5.0)], width=30, height=6, num_batches=1, shares=False) == [
        " 5 ┤                  ⣀⣀⠤⠤⠒⠒⠉⠉",
        "   │          ⣀⣀⠤⠤⠒⠒⠉⠉",
        " 0 ┤  ⣀⣀⠤⠤⠒⠒⠉⠉",
        "-5 ┤⠉⠉",
        "   └──────────────────────────",
        "    0        batches         1",
    ]


def test_no_points_are_an_empty_chart() -> None:
    chart = text_chart([], width=30, height=6, num_batches=4, shares=False)
    assert [line.strip("01.5 ") for line in chart] == ["┤", "│", "┤", "┤", f"└{'─' * 25}", "batches        4"]


@pytest.mark.parametrize(("width", "height"), [(23, 10), (80, 3), (0, 0)])
def test_where_there_is_no_room_there_is_no_chart(width: int, height: int) -> None:
    assert text_chart(RISING, width=width, height=height, num_batches=20, shares=True) == []


def test_a_chart_has_the_size_that_was_asked_for() -> None:
    random = Random(0)
    for _ in range(50):
        width, height = random.randint(24, 200), random.randint(4, 20)
        points = [point(step, random.random()) for step in sorted(random.sample(range(3000), random.randint(1, 500)))]
        chart = text_chart(points, width=width, height=height, num_batches=random.randint(0, 4000), shares=True)
        assert len(chart) == height
        assert max(map(len, chart)) == width


def test_the_report_names_the_change_and_has_a_chart(learning: Curves) -> None:
    report = accuracy_report(learning)
    assert report[:2] == ["held-out accuracy by batches trained on", "  sums: 0.200 -> 0.900 (0.826 to 0.945)"]
    assert len(report) == 12
    assert max(map(len, report)) == 64


def test_the_report_has_the_paired_change_where_it_is_known(evaluation) -> None:
    first, last = evaluation(0, {"sums": 20}), evaluation(4, {"sums": 90})
    last["change"] = {"sums": {"since": 0, "num_prompts": 100, "accuracy": 0.7, "low": 0.6, "high": 0.78}}
    assert accuracy_report(curves_of(evaluations=[first, last]))[1] == (
        "  sums: 0.200 -> 0.900 (0.826 to 0.945), change +0.700 (+0.600 to +0.780)"
    )


def test_the_report_of_several_sets_has_each_and_their_mean(evaluation) -> None:
    curves = curves_of(evaluations=[evaluation(0, {"a": 20, "b": None}), evaluation(1, {"a": 40, "b": 60})])
    assert accuracy_report(curves)[1:4] == [
        "  a: 0.200 -> 0.400 (0.309 to 0.498)",
        "  b: 0.600 (0.502 to 0.691)",
        "  mean of 2 sets: 0.200 -> 0.500",
    ]


def test_without_an_accuracy_there_is_no_report(evaluation) -> None:
    assert accuracy_report(curves_of(evaluations=[])) == []
    assert accuracy_report(curves_of(evaluations=[evaluation(0, {"a": None})])) == []


def test_a_change_without_an_interval_has_none() -> None:
    assert change_text([point(0, 0.25), point(4, 0.5)]) == "0.250 -> 0.500"
