"""The places that engines have for requests: how many fit into their memory, who gets a free one, and who leaves.

How many requests there may be at once is searched for, too: :class:`rollfeed.routing.AdaptiveLimit`.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from rollfeed.engine.client.flights import Flight
from rollfeed.engine.client.replies import ServerLoad

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
    """Return how many flights fit into the memory of servers that have so many; infinite where that is not known.

    What runs there and is none of these, as others' requests or those that have just been aborted, leaves less room:
    what is free of it, or of too much a share as large as that in all.
    """
    uses = [load.kv_use for load in loads if load.kv_use is not None]
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    if not running or not uses or len(uses) < len(loads) or sum(uses) < _FEW_KV_USE * len(uses):
        return math.inf
    fitting = running * _FULL_KV_USE * len(uses) / sum(uses)
    return max(num_flights * fitting / (running + waiting), num_flights + fitting - running - waiting)


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
