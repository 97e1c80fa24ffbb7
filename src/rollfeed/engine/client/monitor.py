"""Watches the workers, off the path of requests: who is alive, at which version, and how busy."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from rollfeed.engine.client.concurrency import Permits, memory_room, room_at, too_many
from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.flights import Worker
from rollfeed.engine.client.replies import Router, ServerLoad
from rollfeed.engine.client.weights import ServerWeights
from rollfeed.engine.client.workers import Orphans, ServerPool
from rollfeed.engine.http import TryFailedError
from rollfeed.errors import EngineError, EngineProtocolError
from rollfeed.routing import AdaptiveLimit, Throughput, Window

_log = logging.getLogger(__name__)

_MEASURING_SECONDS = 1.0
_LOOKS_PER_SECOND = 200
"""At the loads of servers: a thousand are looked at every five seconds."""
_MEMORY_WAITS = 0.8
"""Share of a server's memory in use, from which on requests that wait there wait for memory and not for a place."""
_PATIENT_SECONDS = 4.0
"""After which long responses are not waited for, and what the servers say of their last steps must do."""
_PATIENT_WINDOWS = 4
"""So many of those tell as much as one in which all requests come back."""
_SUSPECTED_SHARE = 0.2
"""Of the probing interval, while a worker's last probe failed."""


class Monitor:
    """Owns a task a worker, and one each for the router and the load; all end with :meth:`close`."""

    def __init__(self, *, pool: ServerPool, router: Router | None, dialect: Dialect, weights: ServerWeights) -> None:
        self._pool = pool
        self._router = router
        self._dialect = dialect
        self._weights = weights
        self._settings = dialect.settings
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self, *, limit: AdaptiveLimit | None, permits: Permits, throughput: Throughput, orphans: Orphans | None = None
    ) -> None:
        """Begin; ``limit`` is steered when there is one, and requests are put back when there are ``orphans``."""
        for worker in self._pool.workers:
            self._spawn(worker.address, self._watch(worker))
        if self._router is not None:
            self._spawn("router", self._follow_router(self._router))
        if limit is not None or len(self._pool.workers) > 1:
            self._spawn("load", self._watch_loads(limit, permits, throughput, orphans))

    async def close(self) -> None:
        """End all tasks; an error that should not have happened in one of them is raised."""
        for task in self._tasks.values():
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def distrust(self, worker: Worker) -> None:
        """Somebody has answered from older weights: take out whoever has them."""
        suspects = self._pool.owners(worker)
        if suspects == (worker,):
            await self._pool.take_out(worker, "it answered from older weights")
        for suspect in suspects:
            suspect.suspected.set()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=f"watch {name}")

    async def _watch(self, worker: Worker) -> None:
        while True:
            failing = worker.is_live and worker.num_failed_probes > 0
            seconds = self._settings.probe_interval_seconds * (_SUSPECTED_SHARE if failing else 1.0)
            try:
                async with asyncio.timeout(seconds):
                    await worker.suspected.wait()
                # Many requests may fail at one moment: that is one reason to look, not many.
                await asyncio.sleep(self._settings.probe_interval_seconds * _SUSPECTED_SHARE)
            except TimeoutError:
                pass
            worker.suspected.clear()
            num_holds = self._weights.num_holds
            if self._weights.is_resting or (worker.is_live and self._weights.is_holding):
                continue  # a paused server does not answer
            try:
                await self._probe(worker)
            except EngineError as error:
                if not (worker.is_live and num_holds != self._weights.num_holds):
                    await self._failed(worker, error)

    async def _probe(self, worker: Worker) -> None:
        timeout_seconds = self._settings.probe_timeout_seconds
        before = self._weights.current_version
        if not worker.is_live:
            # It may have been taken out while it was paused, and would never answer.
            await self._dialect.release(worker.address, timeout_seconds=timeout_seconds)
        await self._dialect.health(worker.address, timeout_seconds=timeout_seconds)
        version = await self._dialect.version(worker.address, timeout_seconds=timeout_seconds)
        worker.num_failed_probes = 0
        if self._weights.is_updating or self._weights.is_resting or before != self._weights.current_version:
            return
        if not worker.is_live:
            await self._weights.readmit(worker)
        elif version is not None and version < before:
            await self._pool.take_out(worker, f"it serves version {version}, {before} is current")
            worker.suspected.set()
        elif version is not None and version > before:
            with suppress(TryFailedError):  # not all have it yet
                await self._weights.meet_newer([worker], version)

    async def _failed(self, worker: Worker, error: EngineError) -> None:
        worker.num_failed_probes += 1
        if worker.is_live and worker.num_failed_probes >= self._settings.probes_until_dead:
            await self._pool.take_out(worker, f"{worker.num_failed_probes} failed probes, the last: {error}")
        elif not worker.is_live and isinstance(error, EngineProtocolError):
            _log.warning("%s: stays out: %s", worker.address, error)

    async def _follow_router(self, router: Router) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_interval_seconds)
            try:
                listed = await router.workers()
            except EngineError as error:
                _log.warning("the router does not list its workers: %s", error)
                continue
            known = {worker.address: worker for worker in self._pool.workers}
            for address in listed.keys() - known.keys():
                # It has requests already; the first probe finds out whether it should.
                self._spawn(address, self._watch(self._pool.add(address)))
            for address in known.keys() - listed.keys():
                if known[address].is_live:
                    self._pool.forget(known[address])
                    self._tasks.pop(address).cancel()

    async def _watch_loads(
        self, limit: AdaptiveLimit | None, permits: Permits, throughput: Throughput, orphans: Orphans | None
    ) -> None:
        while True:
            live = self._pool.live
            await asyncio.sleep(max(_MEASURING_SECONDS, len(live) / _LOOKS_PER_SECOND))
            if self._weights.is_resting or self._weights.is_holding:
                continue  # what a paused server says of its load is what was so at the pause
            await asyncio.gather(*(self._look_at(worker) for worker in live))
            if limit is None:
                continue
            self._steer(limit, permits, throughput)
            if orphans is not None and self._router is None:
                await asyncio.gather(*(self._relieve(worker, orphans) for worker in live if worker.flights))

    def _steer(self, limit: AdaptiveLimit, permits: Permits, throughput: Throughput) -> None:
        in_flight, live = self._pool.num_flights, self._pool.live
        loads = [worker.load for worker in live if worker.load is not None]
        room = memory_room(loads, in_flight) if len(loads) == len(live) else math.inf
        if not in_flight:  # of what has just been aborted the servers may not know yet
            room = permits.limit
        self._learn(limit, throughput, loads, in_flight)
        told = [load.recompute_seconds for load in loads if load.recompute_seconds is not None]
        permits.hold_seconds = sum(told) / len(told) if told else 0.0
        permits.set_limit(int(max(len(live), min(limit.limit, room))))

    def _learn(self, limit: AdaptiveLimit, throughput: Throughput, loads: Sequence[ServerLoad], in_flight: int) -> None:
        num_live, before = len(self._pool.live), limit.limit
        told = [load.tokens_per_second for load in loads if load.tokens_per_second is not None]
        rate, num_requests = throughput.take(in_flight), throughput.num_requests
        if rate is None and throughput.seconds_waited >= _PATIENT_SECONDS and len(told) == num_live > 0:
            rate, num_requests = sum(told), in_flight // _PATIENT_WINDOWS
        if rate is None:
            return  # the window goes on until enough requests have come back
        limit.set_num_workers(num_live)
        limit.observe(
            Window(
                tokens_per_second=rate,
                num_requests=num_requests,
                running=sum(load.running for load in loads),
                # What waits for memory is bounded by what the servers say of that.
                waiting=sum(load.waiting for load in loads if (load.kv_use or 0.0) < _MEMORY_WAITS),
                in_flight=in_flight,
            )
        )
        throughput.restart(changed=limit.limit != before)

    async def _relieve(self, worker: Worker, orphans: Orphans) -> None:
        """Take the youngest flights from a server that computes over and over again what does not fit there."""
        if worker.load is None:
            return
        now = asyncio.get_running_loop().time()
        put_back = too_many(worker.load, worker.flights, now=now)
        for flight in put_back:
            flight.is_put_back = True
            if self._dialect.aborts_by_closing:
                flight.interrupt()
        if not self._dialect.aborts_by_closing:
            await asyncio.gather(*(orphans.tell([worker], flight.rid) for flight in put_back))

    async def _look_at(self, worker: Worker) -> None:
        before, told = worker.load, None
        with suppress(EngineError):  # its probes find out what is the matter
            told = await self._dialect.load(worker.address)
        worker.load = told.preempted_since(before) if told is not None and told.is_plausible else None
        worker.room = math.inf if worker.load is None else room_at(worker.load, len(worker.flights))
