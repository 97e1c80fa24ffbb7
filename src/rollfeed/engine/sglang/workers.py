"""The servers, which of them may have requests, and what each is working on.

Invariant: a flight is in exactly one worker's (or the router's) set from the moment its request is
sent until its try has ended, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from rollfeed.engine.http import Http, error_message
from rollfeed.engine.sglang.counters import Counters
from rollfeed.engine.sglang.flights import Flight, Turnstile
from rollfeed.engine.sglang.routers import Router
from rollfeed.engine.weight_versions import version_number
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError

_log = logging.getLogger(__name__)

_PREFIX_TOKENS = 512
_AFFINITY_SLACK = 8
"""Requests that a worker may have above the least busy one and still get prompts it has seen."""
_ABORTS_AT_ONCE = 16
_ABORT_SECONDS = 3.0
"""For a worker to confirm; the end of a step waits for it."""


class Worker:
    """One server."""

    def __init__(self, address: str, *, is_live: bool, is_exact: bool = False) -> None:
        self.address = address
        self.is_exact = is_exact
        """Whether it is known to begin no step before the last one has ended."""
        self.is_live = is_live
        """Healthy, at the current version, and given requests."""
        self.num_failed_probes = 0
        self.flights: set[Flight] = set()
        self.suspected = asyncio.Event()
        """Set to have it probed now."""


class WorkerPool:
    """Chooses where a request goes, and takes workers out and back in."""

    def __init__(self, *, router: Router | None, counters: Counters) -> None:
        self._router = router
        self._counters = counters
        self._workers: dict[str, Worker] = {}
        self._gateway = None if router is None else Worker(router.address, is_live=True)
        self._has_live = Turnstile(is_open=False)

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
        return tuple(worker for worker in self._workers.values() if worker.is_live)

    @property
    def flights(self) -> Iterable[Flight]:
        """Everything that is at an engine."""
        holders = (*self._workers.values(), self._gateway) if self._gateway is not None else self._workers.values()
        return [flight for holder in holders for flight in holder.flights]

    def add(self, address: str, *, is_live: bool, is_exact: bool = False) -> Worker:
        """Know a further worker."""
        worker = self._workers[address] = Worker(address, is_live=is_live, is_exact=is_exact)
        self._changed()
        return worker

    def forget(self, worker: Worker) -> None:
        """Know a worker no more, as its router does not."""
        self._workers.pop(worker.address, None)
        self._changed()

    async def choose(self, flight: Flight) -> Worker:
        """Return where to send a flight; waits while no worker is alive. Raises as :meth:`Flight.wait`."""
        await self._has_live.wait(flight)
        if self._gateway is not None:
            return self._gateway
        live = self.live
        others = [worker for worker in live if worker is not flight.avoided]
        candidates = others or live
        least = min(candidates, key=lambda worker: len(worker.flights))
        if len(candidates) == 1:
            return least
        # Samples of one prompt share their prefill when they meet at one worker.
        key = flight.prompt_ids[:_PREFIX_TOKENS].tobytes()
        home = max(candidates, key=lambda worker: crc32(worker.address.encode(), crc32(key)))
        return home if len(home.flights) <= len(least.flights) + _AFFINITY_SLACK else least

    def owners(self, worker: Worker | None) -> Sequence[Worker]:
        """Return who may be working on what was sent to ``worker``: behind a router, anyone."""
        return self.live if worker is None or worker is self._gateway else (worker,)

    async def take_out(self, worker: Worker, reason: str) -> None:
        """Give a worker no more requests; those it has go elsewhere."""
        if not worker.is_live:
            return
        worker.is_live = False
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
        worker.is_live = True
        worker.num_failed_probes = 0
        self._counters.readmitted_workers += 1
        self._changed()
        _log.warning("%s: back", worker.address)

    def _changed(self) -> None:
        self._has_live.set_open(any(worker.is_live for worker in self._workers.values()))


class Orphans:
    """Requests that were given up while an engine may have been working on them; has them aborted.

    What is not confirmed stays counted until its worker confirms an ``abort_all``, as it has to before it
    has requests again.
    """

    def __init__(self, *, pool: WorkerPool, http: Http, counters: Counters) -> None:
        self._pool = pool
        self._http = http
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
            if await abort_at(owners, {"rid": rid}, http=self._http, counters=self._counters):
                self.clear([rid], at=owners)


async def abort_at(workers: Sequence[Worker], body: Mapping[str, object], *, http: Http, counters: Counters) -> bool:
    """Tell workers to abort; return whether all have confirmed. One refusal does not keep the others from it."""

    async def tell(worker: Worker) -> bool:
        try:
            await http.command(f"{worker.address}/abort_request", body, timeout_seconds=_ABORT_SECONDS)
        except EngineError as error:
            counters.failed_aborts += 1
            _log.warning("abort: %s", error)
            return False
        return True

    return all(await asyncio.gather(*(tell(worker) for worker in workers)))


class WorkerLoad(NamedTuple):
    """How busy a server is, by its own account."""

    running: int
    waiting: int
    tokens_per_second: float | None
    """None where the server does not say."""


async def read_model(address: str, *, http: Http, timeout_seconds: float | None = None) -> Mapping[str, Any]:
    """Return what a server says of its model.

    Raises:
        EngineUnavailableError: If it does not answer, or with a 5xx status.
        EngineProtocolError: If what answers is no SGLang server.
    """
    url = f"{address}/model_info"
    reply = await http.control("GET", url, timeout_seconds=timeout_seconds)
    if reply.status == 404:
        url = f"{address}/get_model_info"  # its name on older servers
        reply = await http.control("GET", url, timeout_seconds=timeout_seconds)
    if reply.status >= 500:
        raise EngineUnavailableError(f"{url}: HTTP {reply.status}: {error_message(reply.content)}")
    content = reply.json()
    if reply.status != 200 or "model_path" not in content:
        raise EngineProtocolError(f"{url}: HTTP {reply.status} without a model_path: not an SGLang server")
    return content


async def read_version(address: str, *, http: Http, timeout_seconds: float | None = None) -> int:
    """Return the policy version that a server serves; raises as :func:`read_model`."""
    return told_version(address, await read_model(address, http=http, timeout_seconds=timeout_seconds))


def told_version(address: str, model: Mapping[str, Any]) -> int:
    """Return the policy version in what a server says of its model.

    Raises:
        EngineProtocolError: If it names one that is none.
    """
    try:
        return version_number(model.get("weight_version", "default"))
    except EngineProtocolError as error:
        raise EngineProtocolError(f"{address}: {error}") from None


async def check_health(address: str, *, http: Http, timeout_seconds: float) -> None:
    """Return when a server says that it is healthy.

    Raises:
        EngineUnavailableError: If it does not in time.
    """
    reply = await http.control("GET", f"{address}/health", timeout_seconds=timeout_seconds)
    if reply.status != 200:
        raise EngineUnavailableError(f"{address}/health: HTTP {reply.status}")


async def read_load(address: str, *, http: Http) -> WorkerLoad | None:
    """Return how busy a server is; None where it does not say.

    Raises:
        EngineUnavailableError: If it does not answer.
    """
    reply = await http.control("GET", f"{address}/v1/loads?include=core")
    loads = reply.json().get("loads") if reply.status == 200 else None
    if not isinstance(loads, list) or not loads or not all(isinstance(each, dict) for each in loads):
        return None
    rates = [each.get("gen_throughput") for each in loads]
    try:
        return WorkerLoad(
            running=sum(int(each.get("num_running_reqs", 0)) for each in loads),
            waiting=sum(int(each.get("num_waiting_reqs", 0)) for each in loads),
            tokens_per_second=None if None in rates else float(sum(rates)),
        )
    except (TypeError, ValueError):
        return None
