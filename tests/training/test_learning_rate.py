from __future__ import annotations

import pytest

from rollfeed.config.optimizer import LearningRateSchedule
from rollfeed.training.optimizer import learning_rate


def rates(schedule: str, *, warmup: int = 2, final: float = 0.1) -> list[float]:
    return [
        learning_rate(
            update,
            peak=2.0,
            schedule=LearningRateSchedule(schedule),
            num_updates=7,
            warmup_updates=warmup,
            final_ratio=final,
        )
        for update in range(9)
    ]


def test_warm_up_rises_in_a_line_and_begins_above_zero() -> None:
    assert rates("constant", warmup=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_constant_stays() -> None:
    assert rates("constant")[2:] == [2.0] * 7


def test_linear_falls_in_a_line_to_its_end_and_stays_there() -> None:
    assert rates("linear")[2:] == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2, 0.2, 0.2])


def test_cosine_falls_slowly_at_both_ends() -> None:
    values = rates("cosine", final=0.0)[2:]
    assert values == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0, 0.0, 0.0])


def test_a_run_of_one_update_takes_the_peak() -> None:
    for schedule in LearningRateSchedule:
        rate = learning_rate(0, peak=1.0, schedule=schedule, num_updates=1, warmup_updates=0, final_ratio=0.0)
        assert rate == 1.0
