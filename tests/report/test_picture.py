from __future__ import annotations

import io
import math

import matplotlib
import pytest
from matplotlib.image import imread

from rollfeed.report import Curves, curves_of
from rollfeed.report.picture import draw


def drawn(curves: Curves, title: str = "run") -> bytes:
    file = io.BytesIO()
    draw(curves, title=title, file=file)
    assert imread(io.BytesIO(file.getvalue())).shape == (1050, 1350, 4)
    return file.getvalue()


def test_the_same_curves_give_the_same_picture(learning: Curves) -> None:
    assert drawn(learning) == drawn(learning)
    assert drawn(learning) != drawn(learning, "another")


@pytest.mark.parametrize("name", ["$x^{", "_hidden", "<b>", "日本 🎈", "two\nlines\x00", "n" * 500, "100 %", r"\frac{"])
def test_any_name_can_be_drawn(name: str, evaluation) -> None:
    drawn(curves_of(evaluations=[evaluation(0, {name: 20, "b": 30})]), title=name)


@pytest.mark.parametrize("rights", [[], [None], [0], [100], [30, None, 50]])
@pytest.mark.parametrize("rewards", [[], [0.5], [math.nan], [0.25, 0.25], [-1e99, 1e99]])
def test_little_can_be_drawn(rights, rewards, evaluation) -> None:
    drawn(
        curves_of(
            evaluations=[evaluation(step, {"sums": right}) for step, right in enumerate(rights)],
            metrics=[{"step": step, "rollout/reward_mean": reward} for step, reward in enumerate(rewards)],
        )
    )


def test_many_sets_can_be_drawn(evaluation) -> None:
    rights = {f"set {number}": number for number in range(30)}
    drawn(curves_of(evaluations=[evaluation(0, rights), evaluation(1, rights)]))


def test_a_persons_own_defaults_are_not_used_and_not_changed(learning: Curves) -> None:
    expected = drawn(learning)
    with matplotlib.rc_context({"text.usetex": True, "figure.figsize": (1, 1), "savefig.dpi": 10}):
        assert drawn(learning) == expected
        assert matplotlib.rcParams["text.usetex"] is True
