"""The number of requests at the engines at once, found from what the engines achieve.

More requests make an engine faster until they do not, and past that point slower: a server that
captured its graphs up to a batch of 256 does half as many tokens a second with 512. So the limit
doubles while that pays, stays at the best number it knows, and tries one of its neighbours now and
then. What an engine achieves differs by a fifth from one second to the next, so that a number is
judged when as many requests have come back as it lets through, not before, unless it is clearly bad;
and what was once measured is believed less with every further measurement of the same number.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rollfeed.engine.client.flights import Flight
from rollfeed.engine.client.replies import ServerLoad

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


_FULL_KV_USE = 0.95
"""Share of the places for keys and values to fill."""
_TOO_MANY, _RELIEVED = 1.15, 0.95
"""Times the flights that fit: what a server that puts requests back is relieved from, and to."""
_MOST_SESSIONS = 100_000
_GAIN_WEIGHT = 0.02
"""Of the latest conversation that went on, in what is known of all."""
_FEW_KV_USE = 0.3
"""Below it the share says little of what further requests will hold."""


def room_at(load: ServerLoad, num_flights: int) -> float:
    """Return how many flights a server takes that has so many: all that run there, and what the free memory holds.

    Others may use the server, too: of what is too much, each client takes its part away. Infinite where nothing bounds
    it.
    """
    room = memory_room([load], num_flights)
    if load.waiting > 0:
        # The few above what runs keep a freed place from staying empty.
        running = load.running + max(1, load.running // 16)
        room = min(room, num_flights * running / (load.running + load.waiting))
    return max(1.0, room)


def memory_room(loads: Sequence[ServerLoad], num_flights: int) -> float:
    """Return how many flights fit into the memory of servers that have so many; infinite where that is not known."""
    uses = [load.kv_use for load in loads if load.kv_use is not None]
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    if not running or not uses or len(uses) < len(loads) or sum(uses) < _FEW_KV_USE * len(uses):
        return math.inf
    fitting = running * _FULL_KV_USE * len(uses) / sum(uses)
    return num_flights * fitting / (running + waiting)


def too_many(load: ServerLoad, flights: Collection[Flight], *, now: float) -> Sequence[Flight]:
    """Return which flights are to leave a server that puts requests back: those with the fewest tokens.

    They are so many that those which stay have room to grow; none while few are too many, and never the last one. What
    a server does not stream is taken to have come as fast as it says of all together.
    """
    room = memory_room([load], len(flights))
    if not load.num_preempted or not load.waiting or len(flights) < _TOO_MANY * room:
        return []
    rate = (load.tokens_per_second or 0.0) / max(1, load.running)

    def num_tokens(flight: Flight) -> tuple[float, int]:
        known = flight.num_tokens
        return (known if known > flight.num_sampled else known + rate * (now - flight.sent)), -flight.number

    youngest = sorted((flight for flight in flights if not flight.is_put_back), key=num_tokens)
    return youngest[: max(0, len(youngest) - max(1, int(room * _RELIEVED)))]


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

    def __init__(self, *, num_workers: int, ceiling: int) -> None:
        self._num_workers = max(1, num_workers)
        self._ceiling = ceiling
        self.limit = min(ceiling, _START_A_WORKER * self._num_workers)
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


class Permits:
    """Lets a changing number of flights through at once, those of the oldest conversations first.

    So what was put back, and turns of a conversation that has begun, come before those that have not. While a tool
    runs, a conversation keeps its place against younger ones, so that these do not take the memory that holds its
    prefix. For how long: as its server needs to compute all that it holds. By then so many tokens could have been made
    in the place of the prefix as are lost while everybody waits for it to be computed again. And only while tools are
    mostly so quick that this gains more than it costs.
    """

    def __init__(self, limit: int) -> None:
        self.num_taken = 0
        self.limit = limit
        self.hold_seconds = 0.0
        """For which a conversation between two turns keeps its place."""
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """Numbers of the conversations that were asked for last."""
        self._gain = 0.0
        """Of keeping a place, for the latest conversations: prefixes saved, less what could have been made there."""
        self._held: dict[int, float] = {}
        """Numbers of the conversations that may go on, and since when, in that order."""
        self._held_numbers: list[int] = []
        """The same numbers, sorted."""

    def set_limit(self, limit: int) -> None:
        """Change the number; what is above it is not called back."""
        self.limit = limit
        self._admit()

    def arrived(self, flight: Flight, session: str | None) -> None:
        """Give a new flight its place: that of the first one of its conversation."""
        flight.number = next(self._numbers)
        if session is None:
            return
        flight.number = self._sessions.pop(session, flight.number)
        self._sessions[session] = flight.number
        if (since := self._held.get(flight.number)) is not None and self.hold_seconds > 0.0:
            share = (asyncio.get_running_loop().time() - since) / self.hold_seconds
            self._give_up(flight.number, gain=1.0 - share if share < 1.0 else -1.0)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def ended(self, flight: Flight, session: str | None) -> None:
        """Have a conversation keep its place until its next turn, for a while."""
        if session is not None and self.hold_seconds > 0.0 and flight.number not in self._held:
            self._held[flight.number] = asyncio.get_running_loop().time()
            bisect.insort(self._held_numbers, flight.number)

    async def acquire(self, flight: Flight) -> None:
        """Take a permit, for :meth:`release`; raises as :meth:`Flight.wait`."""
        if not self._waiters and self._may_pass(flight.number):
            self.num_taken += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (flight.number, next(self._numbers), waiter))
        self._admit()
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

    def _may_pass(self, number: int) -> bool:
        if self._held:
            latest = asyncio.get_running_loop().time() - self.hold_seconds
            while self._held and self._held[first := next(iter(self._held))] <= latest:
                self._give_up(first, gain=-1.0)
        num_held = bisect.bisect_left(self._held_numbers, number) if self._gain >= 0.0 else 0
        # One always may: the conversations may have ended.
        return self.num_taken + num_held < self.limit or self.num_taken == 0

    def _give_up(self, number: int, *, gain: float) -> None:
        del self._held[number]
        del self._held_numbers[bisect.bisect_left(self._held_numbers, number)]
        self._gain += _GAIN_WEIGHT * (gain - self._gain)

    def _admit(self) -> None:
        while self._waiters:
            number, _, waiter = self._waiters[0]
            if not waiter.done():
                if not self._may_pass(number):
                    return
                self.num_taken += 1
                waiter.set_result(None)
            heapq.heappop(self._waiters)
