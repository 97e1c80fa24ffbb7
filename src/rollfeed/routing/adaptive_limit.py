"""The number of requests at servers at once, found from what the servers achieve.

More requests make a server faster until they do not, and past that point slower: an engine that
captured its graphs up to a batch of 256 does half as many tokens a second with 512. So the limit
doubles while that pays, stays at the best number it knows, and tries one of its neighbours now and
then. What an engine achieves differs by a fifth from one second to the next, so that a number is
judged when as many requests have come back as it lets through, not before, unless it is clearly bad;
and what was once measured is believed less with every further measurement of the same number.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

_START_A_WORKER = 64
_FEW_REQUESTS = 8
_FULL = 0.9
"""Share of the limit that must be in use for a window to tell anything about it."""
_GAIN = 1.05
"""What doubling must bring to be worth another doubling."""
_BETTER = 1.03
"""What a neighbour must bring to be moved to."""
_CLEARLY_BETTER, _CLEARLY_WORSE = 1.2, 0.8
"""What decides at once."""
_ENOUGH, _LITTLE = 1.0, 0.3
"""Turnovers (as many requests as the limit lets through) by which a limit is judged, and by which a clear case is."""
_MEMORY = 4.0
"""Turnovers that an estimate remembers."""
_BACK_OFF = 0.75
_NEIGHBOUR = 2.0**0.5
_FIRST_HOLD, _LONGEST_HOLD = 60, 240
"""Windows at the best limit before a neighbour is tried; twice as many after each that is not better."""
_SOONER = 4
"""Part of the hold after a trial that may have failed by chance."""


class Window(NamedTuple):
    """One measuring interval of the engines, all together."""

    tokens_per_second: float
    num_requests: int
    """Those that the rate was measured from."""
    running: int
    waiting: int
    """Requests that queue inside the engines."""
    in_flight: int
    """Requests of this client."""


class Throughput:
    """Tokens per second by Little's law: requests at the workers, times what each gets while it is there.

    Unlike a count of tokens it does not depend on when in the window requests end, and unlike the servers' own figure,
    which covers their last few steps and says nothing of prefill, it does not jump. Only requests that began after the
    last change of the limit count: the others were served at another one.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._window_began = 0.0
        self._num_requests = 0
        self._num_tokens = 0
        self._seconds = 0.0

    def note(self, *, began: float, ended: float, num_tokens: int) -> None:
        """Count a request that was at the workers between these times of the event loop."""
        if began >= self._since:
            self._num_requests += 1
            self._num_tokens += num_tokens
            self._seconds += ended - began

    @property
    def seconds_waited(self) -> float:
        """Seconds since this window began."""
        return asyncio.get_running_loop().time() - self._window_began

    @property
    def num_requests(self) -> int:
        """Requests of this window that count."""
        return self._num_requests

    def take(self, in_flight: int) -> float | None:
        """Return tokens per second, or None while too few requests have come back."""
        if self._num_requests < max(_FEW_REQUESTS, in_flight // 8) or self._seconds <= 0.0:
            return None
        return in_flight * self._num_tokens / self._seconds

    def restart(self, *, changed: bool) -> None:
        """Begin another window; ``changed`` tells that the limit is another one from now on."""
        self._window_began = asyncio.get_running_loop().time()
        if changed:
            self._since = self._window_began
        self._num_requests, self._num_tokens, self._seconds = 0, 0, 0.0


class _Estimate:
    """Tokens per second at one limit, by how many turnovers that is known."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.turnovers = 0.0

    def add(self, rate: float, turnovers: float) -> None:
        known = min(self.turnovers, _MEMORY - min(turnovers, _MEMORY))
        self.rate = (self.rate * known + rate * turnovers) / (known + turnovers)
        self.turnovers = known + turnovers


class AdaptiveLimit:
    """A search for the best number of requests; fed a :class:`Window` at a time.

    Invariant: the limit is the best one that is known (:attr:`_best`), or on trial against it.
    """

    def __init__(self, *, num_workers: int, ceiling: int, start_a_worker: int = _START_A_WORKER) -> None:
        self._num_workers = max(1, num_workers)
        self._ceiling = ceiling
        self.limit = min(ceiling, start_a_worker * self._num_workers)
        self._best = self.limit
        self._estimates: dict[int, _Estimate] = {}
        self._doubling = True
        self._hold = 0
        self._next_hold = _FIRST_HOLD
        self._goes_up_next = False
        self._has_settled = False
        """Whether the limit has been measured since it was set; refusals before that say nothing new."""

    def observe(self, window: Window) -> None:
        """Learn from a window and set :attr:`limit` for the next one."""
        self._has_settled = True
        if window.waiting > max(1, window.running // 20):
            self._shrink_to_running(window)
        elif window.in_flight >= _FULL * self.limit:
            estimate = self._estimates.setdefault(self.limit, _Estimate())
            estimate.add(window.tokens_per_second, window.num_requests / self.limit)
            if self.limit == self._best:
                self._stay(estimate)
            else:
                self._judge(estimate, self._estimates[self._best])

    def refused(self) -> None:
        """The engine said that there are too many: ask less at once."""
        if self._has_settled:
            self._settle_at(int(self.limit * _BACK_OFF))

    def set_num_workers(self, num_workers: int) -> None:
        """Scale with the workers that are alive."""
        if num_workers == self._num_workers or num_workers < 1:
            return
        ratio = num_workers / self._num_workers
        self._num_workers = num_workers
        self._estimates.clear()
        self._best = self._bounded(round(self._best * ratio))
        self._set(self._best)

    def _shrink_to_running(self, window: Window) -> None:
        # What runs is what the engine holds; the few above it keep a freed place from staying empty.
        target = max(window.running + max(1, window.running // 16), int(self.limit * _BACK_OFF))
        if target < self.limit:
            self._settle_at(target)

    def _stay(self, estimate: _Estimate) -> None:
        """Be at the best limit that is known, until it is time to try another one."""
        if estimate.turnovers < _ENOUGH:
            return
        if self._hold and not self._doubling:
            self._hold -= 1
            return
        if not self._doubling:
            upwards, self._goes_up_next = self._goes_up_next, not self._goes_up_next
            factor = _NEIGHBOUR if upwards else 1.0 / _NEIGHBOUR
        else:
            factor = 2.0
        target = self._bounded(round(self.limit * factor))
        if target == self.limit:
            self._doubling, self._hold = False, self._next_hold
            return
        self._estimates[target] = _Estimate()  # what it was under other conditions does not count
        self._set(target)

    def _judge(self, trial: _Estimate, best: _Estimate) -> None:
        ratio = trial.rate / max(best.rate, 1e-9)
        is_clear = trial.turnovers >= _LITTLE and not _CLEARLY_WORSE < ratio < _CLEARLY_BETTER
        if trial.turnovers < _ENOUGH and not is_clear:
            return
        if ratio > (_GAIN if self._doubling else _BETTER):
            self._goes_up_next = self.limit > self._best and not self._doubling
            self._best, self._hold, self._next_hold = self.limit, 0, _FIRST_HOLD
        else:
            self._settle_at(self._best)
            if not is_clear:
                self._hold //= _SOONER

    def _settle_at(self, limit: int) -> None:
        self._doubling = False
        self._hold = self._next_hold
        self._next_hold = min(2 * self._next_hold, _LONGEST_HOLD)
        self._best = self._bounded(limit)
        self._set(self._best)

    def _set(self, limit: int) -> None:
        self._has_settled = limit == self.limit
        self.limit = limit

    def _bounded(self, limit: int) -> int:
        return max(min(self._num_workers, self._ceiling), min(limit, self._ceiling))
