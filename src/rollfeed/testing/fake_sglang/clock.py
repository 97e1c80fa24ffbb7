"""Time as a thing that is handed in: the event loop's, perhaps faster, or one that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Tells the time, in seconds, and makes calls at later times."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class LoopClock:
    """The running event loop's time, ``speed`` times as fast."""

    def __init__(self, *, speed: float = 1.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._speed = speed

    def now(self) -> float:
        return self._loop.time() * self._speed

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._loop.call_at(when / self._speed, callback)


class VirtualTimer:
    """A call of a VirtualClock."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Time that passes only when a test says so; calls come in the order of their times."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> VirtualTimer:
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (max(when, self._now), next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass, with every call that falls into it."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._run_next()
        self._now = end

    def run_until_idle(self) -> None:
        """Let time pass until no call is left."""
        while self._timers:
            self._run_next()

    def _run_next(self) -> None:
        when, _, timer = heapq.heappop(self._timers)
        if timer.callback is not None:
            self._now = when
            timer.callback()
