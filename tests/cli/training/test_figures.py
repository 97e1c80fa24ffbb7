from __future__ import annotations

import pytest

from rollfeed.cli.training.figures import Figures, charts_that_fit, duration_text, figure_lines
from rollfeed.report import Curves, curves_of


@pytest.fixture
def curves() -> Curves:
    found = {
        **{"num_prompts": 50, "num_failed": 0, "reward_mean": 0.5, "response_length_mean": 9.0},
        **{"truncated_ratio": 0.0, "accuracy_low": 0.4, "accuracy_high": 0.7},
    }
    return curves_of(
        evaluations=[{"step": step, "sets": {"sums": {**found, "accuracy": 0.5 + 0.1 * step}}} for step in range(2)],
        metrics=[{"step": step, "rollout/reward_mean": 0.5} for step in range(2)],
    )


def test_the_figures_are_those_that_are_known(curves: Curves) -> None:
    figures = Figures(num_batches=20)
    assert figure_lines(figures, None) == ["step 0 of 20", ""]
    figures.step, figures.reward, figures.tokens_per_second, figures.seconds_left = 7, 0.5, 1234.4, 780.0
    figures.doing = "training"
    assert figure_lines(figures, curves) == [
        "step 7 of 20, reward 0.500, 1,234 tokens/s, 13 min left",
        "held-out accuracy 0.500 -> 0.600 (0.400 to 0.700)",
        "training",
    ]


@pytest.mark.parametrize(
    ("width", "height", "titles"),
    [
        (120, 30, [["held-out accuracy", "reward of training"]]),
        (80, 30, [["held-out accuracy"], ["reward of training"]]),
        (80, 13, [["held-out accuracy"]]),
        (120, 6, []),
        (80, 0, []),
    ],
)
def test_charts_stand_where_there_is_room(curves: Curves, width: int, height: int, titles: list[list[str]]) -> None:
    rows = charts_that_fit(curves, width=width, height=height, num_batches=4, ascii_only=False)
    assert [[chart.title for chart in row] for row in rows] == titles
    assert sum(1 + max(len(chart.lines) for chart in row) for row in rows) <= height
    assert all(sum(len(max(chart.lines, key=len)) for chart in row) + 3 * (len(row) - 1) <= width for row in rows)


def test_a_run_without_sets_has_the_reward_alone(curves: Curves) -> None:
    alone = curves_of(evaluations=[], metrics=[{"step": 0, "rollout/reward_mean": 0.5}])
    rows = charts_that_fit(alone, width=120, height=30, num_batches=4, ascii_only=False)
    assert [[chart.title for chart in row] for row in rows] == [["reward of training"]]
    assert charts_that_fit(None, width=120, height=30, num_batches=4, ascii_only=False) == []


def test_durations_are_as_people_say_them() -> None:
    assert [duration_text(seconds) for seconds in (0.4, 59, 61, 3540, 3599, 7380)] == [
        *("0 s", "59 s", "1 min", "59 min", "1 h 00 min", "2 h 03 min"),
    ]
