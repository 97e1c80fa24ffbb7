"""The servers, which of them may have requests, and what each is working on.

Invariant: a flight is in exactly one worker's (or the router's) set from the moment its request is
sent until its try has ended, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.servers import Routing
from rollfeed.engine.client.counters import Counters
from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.flights import Flight, Turnstile, Worker
from rollfeed.engine.client.replies import Router
from rollfeed.errors import EngineError, EngineUnavailableError
from rollfeed.routing import Chooser

_log = logging.getLogger(__name__)

_ABORTS_AT_ONCE = 16
_POLL_SECONDS = 0.02


class ServerPool:
    """Chooses where a request goes, and takes workers out and back in."""

    def __init__(self, *, router: Router | None, counters: Counters, routing: Routing) -> None:
        self._router = router
        self._counters = counters
        self._workers: dict[str, Worker] = {}
        self._gateway = None if router is None else Worker(router.address)
        self._has_live = Turnstile(is_open=False)
        self._live: tuple[Worker, ...] = ()
        self._routing = routing
        self._chooser = Chooser()
        self._num_turns = 0
        self._newest = 0
        """Version for which a worker was chosen last."""

    @property
    def is_behind_router(self) -> bool:
        """Whether a router chooses."""
        return self._router is not None

    @property
    def workers(self) -> Sequence[Worker]:
        """All of them, dead ones included."""
        return tuple(self._workers.values())

    @property
    def live(self) -> Sequence[Worker]:
        """Those that may have requests."""
        return self._live

    @property
    def num_flights(self) -> int:
        """Requests that are at an engine."""
        holders = (*self._workers.values(), self._gateway) if self._gateway is not None else self._workers.values()
        return sum(len(holder.flights) for holder in holders)

    def add(self, address: str, *, is_exact: bool = False) -> Worker:
        """Know a further worker."""
        worker = self._workers[address] = Worker(address, is_exact=is_exact)
        self._changed()
        return worker

    def forget(self, worker: Worker) -> None:
        """Know a worker no more, as its router does not."""
        self._workers.pop(worker.address, None)
        self._chooser.forget_server(worker.address)
        self._changed()

    def check_hope(self) -> None:
        """Raise EngineUnavailableError where every worker is out until new weights are published."""
        problems = [worker.problem for worker in self._workers.values() if not worker.is_live]
        if problems and len(problems) == len(self._workers) and (told := problems[0]) and all(problems):
            raise EngineUnavailableError(told)

    def give_up(self, worker: Worker, problem: str) -> None:
        """Note why a worker that is out cannot come back."""
        worker.problem = problem
        self._has_live.wake()

    async def choose(self, flight: Flight, *, policy_version: int) -> Worker:
        """Return where to send a flight; waits while no worker is alive.

        Raises:
            FlightAbortedError: As :meth:`Flight.wait`.
            EngineUnavailableError: As :meth:`check_hope`.
        """
        while not self._has_live.is_open:
            self.check_hope()
            await self._has_live.look_again(flight)
        if self._gateway is not None:
            return self._gateway
        candidates = self._live
        if len(candidates) == 1:
            return candidates[0]
        if flight.avoided is not None:
            candidates = tuple(worker for worker in candidates if worker is not flight.avoided)
        if self._routing is Routing.PREFIX:
            return self._best(flight, candidates, max(policy_version, self._newest))
        self._counters.load_choices += 1
        candidates = tuple(worker for worker in candidates if worker.has_room) or candidates
        if self._routing is Routing.LEAST_LOADED:
            return min(candidates, key=lambda worker: len(worker.flights))
        self._num_turns += 1
        return candidates[self._num_turns % len(candidates)]

    def _best(self, flight: Flight, candidates: Sequence[Worker], policy_version: int) -> Worker:
        if policy_version > self._newest:
            self._newest = policy_version
            self._chooser.forget_versions_before(policy_version)
        group, session = flight.affinity
        choice = self._chooser.choose(
            candidates, flight.input_ids, policy_version=policy_version, group=group, session=session
        )
        counters, counter = self._counters, f"{choice.reason}_choices"
        setattr(counters, counter, getattr(counters, counter) + 1)
        counters.believed_cached_tokens += choice.num_cached
        return self._workers[choice.address]

    def answered(self, worker: Worker, token_ids: NDArray[np.int32], *, policy_version: int) -> None:
        """Note that a worker has these tokens ``(N,)``, a response and all before it, computed by one version."""
        self._chooser.ended(worker.address, token_ids, policy_version=policy_version)

    def is_remembered(self, worker: Worker, policy_version: int) -> bool:
        """Whether it matters to later choices what a worker has computed by a version."""
        is_chosen = self._routing is Routing.PREFIX and worker is not self._gateway and len(self._live) > 1
        return is_chosen and policy_version == self._newest

    def metrics(self) -> Mapping[str, float]:
        """Return what is so now."""
        live = self.live
        loads = [worker.load for worker in live if worker.load is not None]
        return {
            #: engine/live_workers: servers that may have requests
            "live_workers": float(len(live)),
            #: engine/requests_in_flight: requests at the servers
            "requests_in_flight": float(self.num_flights),
            #: engine/requests_waiting: requests that wait at the live servers by their last word, others' too
            "requests_waiting": float(sum(load.waiting for load in loads)),
            #: engine/kv_use: share of the memory for keys and values in use, of the fullest live server
            "kv_use": max((load.kv_use or 0.0 for load in loads), default=0.0),
            #: engine/preempting_workers: live servers that have lately put requests back for want of memory
            "preempting_workers": float(sum(load.num_preempted > 0 for load in loads)),
        }

    def owners(self, worker: Worker | None) -> Sequence[Worker]:
        """Return who may be working on what was sent to ``worker``: behind a router, anyone."""
        return self.live if worker is None or worker is self._gateway else (worker,)

    async def take_out(self, worker: Worker, reason: str) -> None:
        """Give a worker no more requests; those it has go elsewhere."""
        if not worker.is_live:
            return
        worker.is_live = False
        self._chooser.forget_server(worker.address)  # it may come back with an empty cache
        self._counters.dead_workers += 1
        self._changed()
        _log.warning("%s: taken out: %s", worker.address, reason)
        for flight in tuple(worker.flights):
            flight.interrupt()
        if self._router is not None:
            try:
                await self._router.remove(worker.address)
            except EngineError as error:
                _log.warning("%s: the router keeps it: %s", worker.address, error)

    async def readmit(self, worker: Worker) -> None:
        """Give a worker requests again: it is healthy and at the current version.

        Raises:
            EngineError: If the router does not take it.
        """
        if self._router is not None and worker.address not in await self._router.workers():
            await self._router.add(worker.address)
        worker.is_live, worker.is_unsure, worker.must_reload, worker.problem = True, False, False, None
        worker.num_failed_probes = 0
        self._counters.readmitted_workers += 1
        self._changed()
        _log.warning("%s: back", worker.address)

    def _changed(self) -> None:
        self._live = tuple(worker for worker in self._workers.values() if worker.is_live)
        self._has_live.set_open(bool(self._live))


class Orphans:
    """Requests that were given up while an engine may have been working on them; has them aborted.

    What is not confirmed stays counted until its worker confirms that it works on nothing, as it has to before it
    has requests again.
    """

    def __init__(self, *, pool: ServerPool, dialect: Dialect, counters: Counters) -> None:
        self._pool = pool
        self._dialect = dialect
        self._counters = counters
        self._left: dict[str, int] = {}
        self._owners: dict[str, frozenset[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_ABORTS_AT_ONCE)

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Most tokens that an engine may still make for nobody, by request."""
        return self._left

    def leave(self, rid: str, worker: Worker, *, num_tokens: int) -> None:
        """Count a try that nobody waits for any more, and abort it where it may be."""
        if self._dialect.aborts_by_closing:
            self._counters.closed_requests += 1
            self._counters.closed_tokens += num_tokens
            return
        owners = self._pool.owners(worker)
        self._left[rid] = num_tokens
        self._owners[rid] = frozenset(owner.address for owner in owners)
        self._counters.orphaned_requests += 1
        self._counters.orphaned_tokens += num_tokens
        task = asyncio.create_task(self._abort(rid, owners), name=f"abort {rid}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def clear(self, rids: Iterable[str], *, at: Sequence[Worker]) -> None:
        """Forget those that only these workers may have had: they have confirmed that they work on nothing."""
        confirmed = {worker.address for worker in at}
        for rid in rids:
            if self._owners.get(rid, frozenset()) <= confirmed:
                self._left.pop(rid, None)
                self._owners.pop(rid, None)

    async def abort_all(self, workers: Sequence[Worker]) -> None:
        """Have workers end everything, whoever waits for it."""
        known = tuple(self._left)
        if await self.tell(workers, None):
            self.clear(known, at=workers)

    async def tell(self, workers: Sequence[Worker], rid: str | None) -> bool:
        """Tell workers to abort; return whether all have confirmed. One refusal does not keep the others from it."""

        async def tell(worker: Worker) -> bool:
            try:
                await self._dialect.abort(worker.address, rid)
            except EngineError as error:
                self._counters.failed_aborts += 1
                _log.warning("abort: %s", error)
                return False
            return True

        return all(await asyncio.gather(*(tell(worker) for worker in workers)))

    async def close(self, *, grace_seconds: float) -> None:
        """Let the aborts under way end, within a grace period."""
        tasks = tuple(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _abort(self, rid: str, owners: Sequence[Worker]) -> None:
        async with self._slots:
            # One that is out answers nothing, and is told to end everything before it has requests again.
            told = [owner for owner in owners if owner.is_live or not owner.num_failed_probes]
            if await self.tell(told, rid):
                self.clear([rid], at=told)


async def empty(worker: Worker, *, seconds: float) -> None:
    """End every try at a worker here; the requests go on when they may.

    Raises:
        EngineUnavailableError: If one does not end in time.
    """
    try:
        async with asyncio.timeout(seconds):
            while worker.flights:
                for flight in tuple(worker.flights):
                    flight.interrupt()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise EngineUnavailableError(f"{worker.address}: requests do not end") from None


async def errors_of(calls: Iterable[Awaitable[None]]) -> list[EngineError | None]:
    """Await calls side by side, and return how each has failed."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
            raise outcome
    return [outcome if isinstance(outcome, EngineError) else None for outcome in outcomes]
