"""How many requests are at the engines at once, found from what the engines achieve.

More requests make an engine faster until they do not, and past that point slower: a server that
captured its graphs up to a batch of 256 does half as many tokens a second with 1,024. So the limit
doubles while that pays, then creeps up, and falls back to the best known one when throughput drops
or requests queue inside the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from rollfeed.engine.sglang.flights import Flight

_START_A_WORKER = 64
_FEW_REQUESTS = 8
_FULL = 0.9
"""Share of the limit that must be in use for a window to tell anything about it."""
_GAIN = 1.05
"""What doubling must bring to be worth another doubling."""
_LOSS = 0.95
"""Below this share of the best throughput, the limit has gone too far."""
_BACK_OFF = 0.75
_FORGET = 0.998
"""Share of the best throughput that is still believed a window later; responses grow and workloads change."""
_TRUST = 0.3
"""Weight of a further measurement at the best limit: one lucky window must not be the mark for ever."""
_NUM_DOUBTS = 2
"""Windows in a row that must say that a doubling did not pay: one may have been the end of a step."""
_STEP = 8
"""Outside of doubling the limit grows by one part in so many."""
_FIRST_HOLD, _LONGEST_HOLD = 6, 120
"""Windows without growth after a fall; twice as many after each further one."""


class Window(NamedTuple):
    """What the engines did in one measuring interval, all together."""

    tokens_per_second: float
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
        """How long this window lasts already."""
        return asyncio.get_running_loop().time() - self._window_began

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


class AdaptiveLimit:
    """Additive increase, multiplicative decrease of a number of requests; fed a :class:`Window` at a time."""

    def __init__(self, *, num_workers: int, ceiling: int) -> None:
        self._num_workers = max(1, num_workers)
        self._ceiling = ceiling
        self.limit = min(ceiling, _START_A_WORKER * self._num_workers)
        self._best_rate = 0.0
        self._best_limit = self.limit
        self._doubling = True
        self._num_doubts = 0
        self._hold = 0
        self._next_hold = _FIRST_HOLD
        self._has_settled = False
        """Whether the limit has been measured since it was set; refusals before that say nothing new."""

    def observe(self, window: Window) -> None:
        """Learn from a window and set :attr:`limit` for the next one."""
        self._best_rate *= _FORGET
        self._has_settled = True
        if window.waiting > max(1, window.running // 20):
            self._shrink_to_running(window)
        elif window.in_flight >= _FULL * self.limit:
            self._climb(window.tokens_per_second)

    def refused(self) -> None:
        """The engine said that there are too many: ask less at once."""
        if self._has_settled:
            self._fall_to(int(self.limit * _BACK_OFF))

    def set_num_workers(self, num_workers: int) -> None:
        """Scale with the workers that are alive."""
        if num_workers == self._num_workers or num_workers < 1:
            return
        ratio = num_workers / self._num_workers
        self._num_workers = num_workers
        self._best_limit = self._bounded(round(self._best_limit * ratio))
        self._best_rate *= ratio
        self._set(round(self.limit * ratio))

    def _shrink_to_running(self, window: Window) -> None:
        # What runs is what the engine holds; the few above it keep a freed place from staying empty.
        target = max(window.running + max(1, window.running // 16), int(self.limit * _BACK_OFF))
        if target < self.limit:
            self._best_limit = min(self._best_limit, target)
            self._fall_to(target)

    def _climb(self, rate: float) -> None:
        if not self._doubling and self.limit == self._best_limit:
            self._best_rate += _TRUST * (rate - self._best_rate)
        elif rate > self._best_rate * (_GAIN if self._doubling else 1.0):
            self._best_rate, self._best_limit = rate, self.limit
        elif self._doubling or (rate < _LOSS * self._best_rate and self.limit > self._best_limit):
            self._num_doubts += 1
            if self._num_doubts == _NUM_DOUBTS:
                self._fall_to(self._best_limit)
            return
        self._num_doubts = 0
        if self._hold:
            self._hold -= 1
        elif self._doubling:
            self._set(2 * self.limit)
        else:
            self._set(self.limit + max(1, self.limit // _STEP))

    def _fall_to(self, limit: int) -> None:
        self._doubling = False
        self._num_doubts = 0
        self._hold = self._next_hold
        self._next_hold = min(2 * self._next_hold, _LONGEST_HOLD)
        self._set(limit)

    def _set(self, limit: int) -> None:
        limit = self._bounded(limit)
        self._has_settled = limit == self.limit
        self.limit = limit

    def _bounded(self, limit: int) -> int:
        return max(min(self._num_workers, self._ceiling), min(limit, self._ceiling))


class Permits:
    """Lets a changing number of flights through at once, in the order in which they came."""

    def __init__(self, limit: int) -> None:
        self.num_taken = 0
        self.limit = limit
        self._waiters: deque[asyncio.Future[None]] = deque()

    def set_limit(self, limit: int) -> None:
        """Change the number; what is above it is not called back."""
        self.limit = limit
        self._admit()

    async def acquire(self, flight: Flight) -> None:
        """Take a permit, for :meth:`release`; raises as :meth:`Flight.wait`."""
        if self.num_taken < self.limit and not self._waiters:
            self.num_taken += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await flight.wait(waiter)
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()
            raise

    def release(self) -> None:
        """Give a permit back."""
        self.num_taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiters and (self.num_taken < self.limit or self._waiters[0].done()):
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.num_taken += 1
                waiter.set_result(None)
