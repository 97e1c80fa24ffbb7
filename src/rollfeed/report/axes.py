"""Axes: where a chart begins and ends, and the numbers written at it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_FLAT = 1e-9  # values that differ by less, relatively, are drawn as one


@dataclass(frozen=True, slots=True)
class Axis:
    """A range whose ends are round numbers, and the round numbers in it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    """In rising order."""
    labels: tuple[str, ...]
    """Of the ticks."""

    def share(self, value: float) -> float:
        """Return where a value is: 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


def value_axis(values: Iterable[float], *, num_ticks: int = 5, least_step: float = 0.0) -> Axis:
    """Return the axis of finite values, near or above ``num_ticks`` ticks; of 0 to 1 where there is none.

    Ticks are at least ``least_step`` apart.
    """
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    largest = max(abs(low), abs(high))
    if high - low <= max(_FLAT * largest, 1e-12):
        padding = 0.1 * largest or 0.5
        low, high = low - max(padding, 1e-9), high + max(padding, 1e-9)
    return _axis(low, high, _round_step(max(least_step, (high - low) / (num_ticks - 1))))


def share_axis(values: Iterable[float], *, num_ticks: int = 5) -> Axis:
    """Return the axis of shares, within 0 and 1: around the values, and not so close that noise looks large."""
    found = list(values) or [0.0, 1.0]
    low, high = math.floor(min(found) * 10 + 1e-9) / 10, math.ceil(max(found) * 10 - 1e-9) / 10
    low, high = (low, high) if high - low > 0.15 else (max(0.0, low - 0.1), min(1.0, high + 0.1))
    axis = _axis(low, high, _round_step((high - low) / (num_ticks - 1)))
    return axis if axis.high <= 1.0 + 1e-9 and axis.low >= -1e-9 else _axis(0.0, 1.0, 0.25)


def step_axis(last: int, *, num_ticks: int = 6) -> Axis:
    """Return the axis of batches from 0 to ``last``, which is its end though it may not be round."""
    last = max(last, 1)
    step = max(1, round(_round_step(last / (num_ticks - 1))))
    ticks = tuple(float(tick) for tick in range(0, last + 1, step))
    return Axis(0.0, float(last), ticks, tuple(f"{tick:.0f}" for tick in ticks))


def number_text(value: float) -> str:
    """Return a number as people read it: three digits behind the point, or four that count."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:.3g}"


def _axis(low: float, high: float, step: float) -> Axis:
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, tuple(_tick_text(tick, step) for tick in ticks))


def _round_step(least: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten: the first that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(
        (factor * power for factor in (1.0, 2.0, 2.5, 5.0) if factor * power >= least * (1 - 1e-9)), 10.0 * power
    )


def _tick_text(value: float, step: float) -> str:
    if 1e-4 <= step < 1e5:
        decimals = next(count for count in range(6) if count == 5 or abs(step * 10**count % 1.0) < 1e-6)
        return f"{value + 0.0:.{decimals}f}" if abs(value) > step / 2 else f"{0:.{decimals}f}"
    return f"{value:.3g}" if abs(value) > step / 2 else "0"
