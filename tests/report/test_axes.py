from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.report.axes import number_text, share_axis, step_axis, value_axis


@given(st.lists(st.floats(-1e100, 1e100), max_size=5))
def test_an_axis_has_room_for_every_value_and_few_rising_ticks(values: list[float]) -> None:
    axis = value_axis(values)
    slack = 1e-5 * (axis.high - axis.low)
    assert all(axis.low - slack <= value <= axis.high + slack for value in values)
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 2 <= len(axis.ticks) <= 8
    assert len(axis.labels) == len(axis.ticks)


@given(st.lists(st.floats(0, 1), max_size=5))
def test_an_axis_of_shares_stays_within_0_and_1(values: list[float]) -> None:
    axis = share_axis(values)
    assert -1e-9 <= axis.low < axis.high <= 1 + 1e-9
    assert all(axis.low - 1e-6 <= value <= axis.high + 1e-6 for value in values)
    assert axis.high - axis.low > 0.09
    assert 2 <= len(axis.ticks) <= 8


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ("0.00", "0.25", "0.50", "0.75", "1.00")),
        ([-3.0, 1.0], ("-3", "-2", "-1", "0", "1")),
        ([25.0, 41.0], ("25", "30", "35", "40", "45")),
        ([1e-5, 2e-5], ("1e-05", "1.25e-05", "1.5e-05", "1.75e-05", "2e-05")),
        ([], ("0.00", "0.25", "0.50", "0.75", "1.00")),
    ],
)
def test_ticks_are_round_numbers(values: list[float], labels: tuple[str, ...]) -> None:
    assert value_axis(values).labels == labels


def test_an_axis_of_batches_has_whole_numbers_and_ends_where_the_run_does() -> None:
    assert step_axis(20).labels == ("0", "5", "10", "15", "20")
    assert step_axis(23).high == 23.0
    assert step_axis(23).labels == ("0", "5", "10", "15", "20")
    assert step_axis(3).labels == ("0", "1", "2", "3")
    assert step_axis(0).labels == ("0", "1")


def test_numbers_are_short() -> None:
    assert [number_text(value) for value in (0.0, 0.18, -1.5, 123.45, 1.5e-6, 2e9)] == [
        *("0.000", "0.180", "-1.500", "123.5", "1.5e-06", "2e+09"),
    ]
