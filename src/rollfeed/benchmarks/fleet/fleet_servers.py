"""The servers of a simulated fleet: fakes on the loop's time, some of which are slow and some of which die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from rollfeed.benchmarks.fleet.fleet_loop import FleetLoop
from rollfeed.benchmarks.fleet.fleet_workload import FleetWorkload
from rollfeed.testing.fake_sglang import FakeServer, Timer, bound_tokens_per_second

_POLL_SECONDS = 0.5


class Recovery(NamedTuple):
    """The consequences of one death, in seconds after it."""

    taken_out: float | None
    """Until it got no more requests; None where that did not happen before the end."""
    back: float | None
    """Until it got some again, with the current weights."""


class FleetServers:
    """Starts them, and has them die at random times once it is told to. Belongs to one loop."""

    def __init__(self, workload: FleetWorkload, loop: FleetLoop) -> None:
        self._workload = workload
        self._loop = loop
        self._random = Random(workload.seed)
        slow = set(self._random.sample(range(workload.num_engines), workload.num_stragglers))
        clock = _ServerClock(loop)
        settings = [workload.server_settings(is_straggler=is_slow) for is_slow in (False, True)]
        self.servers: Sequence[FakeServer] = [
            FakeServer(settings[number in slow], clock=clock) for number in range(workload.num_engines)
        ]
        self.bound_tokens_per_second = sum(
            bound_tokens_per_second(server.settings.time_model, prompt_tokens=workload.prompt_tokens)
            for server in self.servers
        )
        """Response tokens of all, at most: every slot taken all the time."""
        self.recoveries: list[Recovery] = []
        self._dying: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()

    async def start(self) -> Sequence[str]:
        """Have all listen, and return their addresses."""
        for server in self.servers:
            await server.start()
        return [server.address for server in self.servers]

    async def stop(self) -> None:
        """End all of them, and what was to happen to them."""
        tasks = [*self._watching, *([self._dying] if self._dying else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with self._loop.work.counted():
            for server in self.servers:
                server.http.close()
                server.backend.abort(lambda _: True)

    def let_die(self, is_live: Callable[[str], bool]) -> None:
        """Begin with deaths; ``is_live`` tells whether the server at an address gets requests."""
        self._dying = asyncio.create_task(self._die(is_live), name="deaths")

    @property
    def generated_tokens(self) -> int:
        """Tokens that all have made so far; what a server made before it was started again is not counted."""
        with self._loop.work.counted():
            return sum(server.backend.usage().generated_tokens for server in self.servers)

    async def _die(self, is_live: Callable[[str], bool]) -> None:
        while self._workload.deaths_per_second > 0.0:
            await asyncio.sleep(self._random.expovariate(self._workload.deaths_per_second))
            server = self._random.choice(self.servers)
            if not server.http.is_listening:
                continue  # it is dead already
            task = asyncio.create_task(self._recover(server, is_live))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)

    async def _recover(self, server: FakeServer, is_live: Callable[[str], bool]) -> None:
        died, taken_out, back = self._loop.time(), None, None
        restarts = died + self._workload.restart_seconds
        with self._loop.work.counted():
            server.die()
        try:
            while back is None:
                await asyncio.sleep(_POLL_SECONDS)
                if not server.http.is_listening and self._loop.time() >= restarts:
                    await server.restart()
                if taken_out is None and not is_live(server.address):
                    taken_out = self._loop.time() - died
                elif taken_out is not None and is_live(server.address):
                    back = self._loop.time() - died
        finally:
            self.recoveries.append(Recovery(taken_out, back))


class _ServerClock:
    """The loop's time; what servers do at a time is counted as theirs."""

    def __init__(self, loop: FleetLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._loop.call_at(when, self._call, callback)

    def _call(self, callback: Callable[[], object]) -> None:
        with self._loop.work.counted():
            callback()
