"""From a flight to its completion: tries, what a failure means, and when to give up.

Invariant: a request that the caller has aborted, or given up, is never sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import NamedTuple

from rollfeed.engine.http import Failure, Http, TryFailedError
from rollfeed.engine.sglang.counters import Counters
from rollfeed.engine.sglang.flights import Flight, FlightAbortedError, Turnstile, encode_request
from rollfeed.engine.sglang.replies import Reply, decode_reply
from rollfeed.engine.sglang.workers import Orphans, Worker, WorkerPool
from rollfeed.engine.weight_versions import with_later_borders
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import FinishKind, VersionSpan

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_LARGE_BODY_BYTES = 1 << 18
_COUNTER_OF = {
    Failure.CONNECTION: "connection_failures",
    Failure.SERVER: "server_errors",
    Failure.REFUSED: "refused_requests",
    Failure.BROKEN: "broken_replies",
    Failure.STALE: "stale_replies",
}


class DispatchParts(NamedTuple):
    """What a dispatcher works with."""

    http: Http
    pool: WorkerPool
    orphans: Orphans
    counters: Counters
    admission: Turnstile
    """Closed while weights change or the engine is paused."""
    current_version: Callable[[], int]
    counts_late: Callable[[Worker], bool]
    """Whether whoever has a flight counts the first token of a version's span to it that still came from the last."""
    distrust: Callable[[Worker], Awaitable[None]]
    """Called with whoever has answered from older weights."""
    refused: Callable[[], None]
    """Called when an engine says that there are too many requests."""


class Dispatcher:
    """Sends flights until they are answered."""

    def __init__(self, parts: DispatchParts, *, max_tries: int) -> None:
        self._parts = parts
        self._max_tries = max_tries
        self._jitter = Random()
        self._numbers = itertools.count()
        self._suffix = secrets.token_hex(4)
        self._decoding = ThreadPoolExecutor(1, thread_name_prefix="rollfeed-decode")

    def close(self) -> None:
        """End the decoding thread."""
        self._decoding.shutdown(wait=False)

    async def answer(self, flight: Flight) -> None:
        """Fill ``flight.parts`` until the last one ends the response.

        Raises:
            FlightAbortedError: If it was aborted between two tries; ``flight.parts`` is what it has.
            EngineUnavailableError: If every try failed.
            EngineProtocolError: If a try can never succeed.
        """
        while True:
            worker = await self._next_worker(flight)
            try:
                reply = await self._try(flight, worker)
            except TryFailedError as failure:
                await self._back_off(flight, worker, failure)
                continue
            except EngineProtocolError:
                self._parts.counters.rejected_replies += 1
                raise
            flight.parts.append(reply)
            if reply.finish_reason.kind is not FinishKind.ABORT or flight.aborted or flight.remaining_tokens <= 0:
                return
            # Nobody here asked for the abort: the rest of the response is still wanted.
            self._parts.counters.redispatched_requests += 1
            if not len(reply.token_ids):
                unasked = TryFailedError(Failure.UNASKED_ABORT, f"{worker.address}: aborted by the server")
                await self._back_off(flight, worker, unasked)

    async def _next_worker(self, flight: Flight) -> Worker:
        while True:
            await self._parts.admission.wait(flight)
            worker = await self._parts.pool.choose(flight)
            if self._parts.admission.is_open:
                break
        if flight.aborted:
            raise FlightAbortedError
        return worker

    async def _try(self, flight: Flight, worker: Worker) -> Reply:
        parts = self._parts
        # A server aborts every request whose id begins with the one it is told: no id may begin with another.
        flight.rid = f"{flight.request_id}.{self._suffix}{next(self._numbers):08x}"
        flight.worker = worker
        worker.flights.add(flight)
        sent_version, may_run = parts.current_version(), True
        try:
            async with flight.interruptible():
                content = await parts.http.generate(
                    worker.address, "/generate", encode_request(flight), is_router=parts.pool.is_behind_router
                )
            may_run = False
        except TryFailedError as failure:
            may_run = failure.may_run
            raise
        except EngineProtocolError:
            may_run = False
            raise
        except TimeoutError:
            raise TryFailedError(Failure.LOST, f"{worker.address}: taken out while it was working") from None
        finally:
            worker.flights.discard(flight)
            if may_run:
                parts.orphans.leave(flight.rid, worker, num_tokens=flight.remaining_tokens)
            flight.land()
        return await self._checked(flight, worker, content, sent_version)

    async def _checked(self, flight: Flight, worker: Worker, content: bytes | bytearray, sent_version: int) -> Reply:
        with_mask = flight.params.return_sampling_mask
        decode = partial(decode_reply, content, max_new_tokens=flight.remaining_tokens, with_mask=with_mask)
        try:
            if len(content) > _LARGE_BODY_BYTES:
                reply = await asyncio.get_running_loop().run_in_executor(self._decoding, decode)
            else:
                reply = decode()
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{worker.address}: {error}") from error
        num_tokens = len(reply.token_ids)
        version = sent_version if reply.policy_version is None else reply.policy_version
        if num_tokens and version < sent_version:
            await self._parts.distrust(worker)
            message = f"{worker.address}: answered from version {version}, {sent_version} is current"
            raise TryFailedError(Failure.STALE, message)
        if num_tokens and not reply.version_spans:
            # When the weights changed under a request, which token saw which is not known: call them old.
            changed = self._parts.current_version() != sent_version or not self._parts.admission.is_open
            version = sent_version if changed else version
            reply = reply._replace(version_spans=(VersionSpan(0, num_tokens, version),))
        elif len(reply.version_spans) > 1 and self._parts.counts_late(worker):
            reply = reply._replace(version_spans=with_later_borders(reply.version_spans))
        return reply

    async def _back_off(self, flight: Flight, worker: Worker, failure: TryFailedError) -> None:
        counters, kind = self._parts.counters, failure.failure
        counter = _COUNTER_OF.get(kind)
        if counter is not None:
            setattr(counters, counter, getattr(counters, counter) + 1)
        if kind is Failure.REFUSED:
            flight.num_refusals += 1
            self._parts.refused()
        elif kind is not Failure.LOST:
            flight.num_failures += 1
            flight.avoided = worker
            for owner in self._parts.pool.owners(worker):
                owner.suspected.set()
        if flight.aborted:
            raise FlightAbortedError
        if flight.num_failures >= self._max_tries:
            raise EngineUnavailableError(
                f"no answer after {flight.num_failures} failed tries; the last: {failure}"
            ) from failure
        counters.retries += 1
        if kind is Failure.LOST or (kind is Failure.CONNECTION and failure.may_run):
            counters.redispatched_requests += 1
        if kind is not Failure.LOST:
            await flight.sleep(self._wait_seconds(flight, failure))

    def _wait_seconds(self, flight: Flight, failure: TryFailedError) -> float:
        num_before = (flight.num_refusals if failure.failure is Failure.REFUSED else flight.num_failures) - 1
        longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(num_before, 16))
        return max(failure.wait_seconds or 0.0, longest * self._jitter.uniform(0.5, 1.0))
