"""From a flight to its completion: tries, what a failure means, and when to give up.

Invariants: a request that the caller has aborted, or given up, is never sent again; what a try has sampled is kept when
the try ends early, for whatever reason, and the next try goes on behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from random import Random
from typing import Any, NamedTuple

import numpy as np

from rollfeed.base.waiting import Deadlines
from rollfeed.completions import check_finish, check_hashes, check_places, check_tokens
from rollfeed.engine.client.concurrency import Permits
from rollfeed.engine.client.connecting import Sight
from rollfeed.engine.client.counters import Counters
from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.flights import Flight, FlightAbortedError, Turnstile, Worker
from rollfeed.engine.client.replies import IncomingReply, Reply, ServerRequest
from rollfeed.engine.client.versions import with_later_borders
from rollfeed.engine.client.weights import ServerWeights
from rollfeed.engine.client.workers import Orphans, ServerPool
from rollfeed.engine.http import LARGEST_BODY_BYTES, Failure, Http, TryFailedError
from rollfeed.errors import EngineProtocolError, EngineUnavailableError, PictureMismatchError
from rollfeed.protocols import PictureProcessor, Tokenizer
from rollfeed.routing import Affinity
from rollfeed.types import FinishKind, VersionSpan

_log = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 10.0
_LARGE_BODY_BYTES = 1 << 18
_BYTES_A_TOKEN, _BYTES_BESIDES = 4096, 1 << 20
"""More than any server writes: an event has a few hundred for its token."""
_ROUTING_HEADERS = ("X-SMG-Routing-Key", "X-Session-ID")
"""Read by sglang-router and smg (`manual`, `consistent_hashing`), and by vllm-router (`consistent_hash`)."""
_GROUP_HEADER = "X-Group-Id"
"""Read by `rollfeed serve router`."""
_COUNTER_OF = {
    Failure.CONNECTION: "connection_failures",
    Failure.SERVER: "server_errors",
    Failure.REFUSED: "refused_requests",
    Failure.BROKEN: "broken_replies",
    Failure.STALE: "stale_replies",
    Failure.UNASKED_ABORT: "unasked_aborts",
}


class DispatchParts(NamedTuple):
    """Everything that a dispatcher works with."""

    http: Http
    dialect: Dialect
    pool: ServerPool
    orphans: Orphans
    counters: Counters
    admission: Turnstile
    """Closed while weights change or the engine is paused."""
    weights: ServerWeights
    distrust: Callable[[Worker], Awaitable[None]]
    """Called with whoever has answered from older weights."""
    refused: Callable[[], None]
    """Called when an engine says that there are too many requests."""
    permits: Permits
    context_length: int
    vocab_size: int
    pictures: PictureProcessor | None
    tokenizer: Tokenizer


class Dispatcher:
    """Sends flights until they are answered."""

    def __init__(self, parts: DispatchParts, *, max_tries: int) -> None:
        self._parts = parts
        self._max_tries = max_tries
        self._deadlines = Deadlines()
        self._jitter = Random()
        self._numbers = itertools.count()
        self._suffix = secrets.token_hex(4)
        self._sight = Sight(parts.pictures, version=self._steady_version, ask=self._ask)
        self.decoding = ThreadPoolExecutor(1, thread_name_prefix="rollfeed-decode")
        """For what would hold up the event loop."""

    def close(self) -> None:
        """End the decoding thread."""
        self.decoding.shutdown(wait=False)

    async def answer(self, flight: Flight, *, timeout_seconds: float) -> None:
        """Fill ``flight.parts`` until the last one ends the response.

        Raises:
            FlightAbortedError: If it was aborted between two tries; ``flight.parts`` is what it has.
            TimeoutError: If that takes longer, without its waits for a turn.
            EngineUnavailableError: If every try failed.
            EngineProtocolError: If a try can never succeed.
        """
        permits, loop = self._parts.permits, asyncio.get_running_loop()
        while True:
            flight.is_put_back = False
            await permits.acquire(flight)
            began = loop.time()
            try:
                # Its waits for a turn end with the deadlines of those before.
                async with self._deadlines.within(timeout_seconds - flight.served_seconds):
                    await self._serve(flight)
            finally:
                permits.release()
                flight.served_seconds += loop.time() - began
            if not flight.is_put_back:
                return
            self._parts.counters.put_back_requests += 1

    async def _serve(self, flight: Flight) -> None:
        """Send a flight until it has been answered or is put back."""
        while not flight.is_put_back and flight.remaining_tokens > 0:
            worker = await self._next_worker(flight)
            if flight.parts:
                self._parts.counters.resumed_requests += 1
            try:
                reply = await self._try(flight, worker)
            except TryFailedError as failure:
                if not (flight.is_put_back and failure.failure is Failure.LOST):
                    await self._back_off(flight, worker, failure)
                continue
            except (EngineProtocolError, PictureMismatchError) as error:
                self._parts.counters.rejected_replies += 1
                if isinstance(error, EngineProtocolError):
                    self._ask_another(flight, worker, error)
                    continue
                raise PictureMismatchError(f"{worker.address}: {error}") from error
            has_more = flight.keep(reply)
            if reply.finish_reason.kind is not FinishKind.ABORT or flight.aborted or flight.remaining_tokens <= 0:
                flight.is_put_back = False
                return
            if flight.is_put_back:
                return
            # Nobody here asked for the abort: the rest of the response is still wanted.
            self._parts.counters.redispatched_requests += 1
            if not has_more:
                unasked = TryFailedError(Failure.UNASKED_ABORT, f"{worker.address}: aborted by the server")
                await self._back_off(flight, worker, unasked)

    def _ask_another(self, flight: Flight, worker: Worker, error: EngineProtocolError) -> None:
        """Have another server asked, once, where one has answered what cannot be; raises that where there is none."""
        if flight.aborted:
            raise FlightAbortedError from error
        if flight.was_rejected or len(self._parts.pool.live) < 2:
            raise error
        flight.was_rejected, flight.avoided = True, worker
        self._parts.counters.retries += 1
        worker.num_rejected += 1
        if worker.num_rejected.bit_count() == 1:  # the first, second, fourth ...
            _log.warning("%s (reply %d of it that is refused; another server is asked)", error, worker.num_rejected)

    async def _next_worker(self, flight: Flight) -> Worker:
        while True:
            await self._parts.admission.wait(flight)
            worker = await self._parts.pool.choose(flight, policy_version=self._parts.weights.current_version)
            try:
                if worker.is_unsure:
                    await self._parts.weights.assure(worker)
                elif self._sight.is_unknown(flight, worker):
                    await self._sight.find_out(flight, worker)
                elif self._parts.admission.is_open:
                    break
            except TryFailedError as failure:
                await self._back_off(flight, worker, failure)
        if flight.aborted:
            raise FlightAbortedError
        return worker

    async def _try(self, flight: Flight, worker: Worker) -> Reply:
        parts = self._parts
        # A server aborts every request whose id begins with the one it is told: no id may begin with another.
        flight.rid = f"{flight.request_id}.{self._suffix}{next(self._numbers):08x}"
        flight.worker, flight.policy_version = worker, parts.weights.current_version
        flight.sent = asyncio.get_running_loop().time()
        request = parts.dialect.request(flight, worker)
        flight.answer = answer = request.answer
        received = self._receive(flight, worker, request)
        del request  # its body may be long, and thousands wait for their replies
        worker.flights.add(flight)
        sent_version, may_run, was_interrupted = flight.policy_version, True, False
        try:
            async with flight.interruptible():
                content = await received
            may_run = False
        except TryFailedError as failure:
            may_run = failure.may_run and not answer.has_finished
            if not answer.has_finished:  # otherwise all is there, and only the end of the stream is not
                self._keep_partial(flight, answer, sent_version)
                raise
            content = None
        except EngineProtocolError:
            may_run = False
            raise
        except TimeoutError:
            was_interrupted = True
        finally:
            rid = flight.rid
            worker.flights.discard(flight)
            if may_run:
                num_tokens = flight.remaining_tokens - answer.num_tokens
                parts.orphans.leave(rid, worker, num_tokens=num_tokens)
            flight.land()
        if was_interrupted:
            self._keep_partial(flight, answer, sent_version)
            raise TryFailedError(Failure.LOST, f"{worker.address}: taken out while it was working")
        try:
            await self._take(answer, content)
            return await self._checked(flight, rid, worker, answer.reply(), sent_version)
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{worker.address}: {error}") from error

    def _steady_version(self) -> int | None:
        return self._parts.weights.current_version if self._parts.admission.is_open else None

    async def _ask(self, flight: Flight, worker: Worker) -> Reply:
        """Send a request of our own once, and return its reply."""
        flight.rid = f"{flight.request_id}.{self._suffix}{next(self._numbers):08x}"
        request = self._parts.dialect.request(flight, worker)
        await self._take(request.answer, await self._receive(flight, worker, request))
        return request.answer.reply()

    def _receive(
        self, flight: Flight, worker: Worker, request: ServerRequest
    ) -> Coroutine[Any, Any, bytes | bytearray | None]:
        params = flight.params
        # vLLM started to return experts does so unasked, of prompts as well: 1,600 bytes a token with 60 layers of 10.
        num_tokens = len(flight.prompt_ids) + params.max_new_tokens
        return self._parts.http.generate(
            worker.address,
            request.path,
            request.body,
            # A mask has as many ids a token as the vocabulary at most; experts are as many as the model has layers.
            most_bytes=LARGEST_BODY_BYTES
            if params.return_sampling_mask or params.return_routed_experts
            else _BYTES_BESIDES + _BYTES_A_TOKEN * num_tokens,
            events=request.answer.take,
            headers=self._routing_headers(flight.affinity),
            is_router=self._parts.pool.is_behind_router,
        )

    def _routing_headers(self, affinity: Affinity) -> Mapping[str, str] | None:
        """Return the key by which routers keep requests together, as SGLang's and vLLM's read it."""
        key = affinity.session or affinity.group
        if key is None or not self._parts.pool.is_behind_router:
            return None
        headers = dict.fromkeys(_ROUTING_HEADERS, self._digest(key))
        return headers if affinity.group is None else {**headers, _GROUP_HEADER: self._digest(affinity.group)}

    def _digest(self, key: str) -> str:
        # Other runs may use the router, and may have the same keys.
        return blake2b(f"{self._suffix} {key}".encode(), digest_size=16).hexdigest()

    async def _take(self, answer: IncomingReply, content: bytes | bytearray | None) -> None:
        if content is None:
            return
        if len(content) > _LARGE_BODY_BYTES:
            await asyncio.get_running_loop().run_in_executor(self.decoding, answer.take, content)
        else:
            answer.take(content)

    def _keep_partial(self, flight: Flight, answer: IncomingReply, sent_version: int) -> None:
        """Keep what a try has sampled that ended early."""
        if not answer.num_tokens:
            return
        reply = answer.reply()
        if len(reply.token_ids):
            self._check(flight, reply)
            reply = reply._replace(version_spans=(VersionSpan(0, len(reply.token_ids), sent_version),))
        flight.keep(reply)

    async def _checked(self, flight: Flight, rid: str, worker: Worker, reply: Reply, sent_version: int) -> Reply:
        num_tokens, parts = len(reply.token_ids), self._parts
        if reply.request_id is not None and self._is_of_another(reply.request_id, rid):
            raise EngineProtocolError(f"answers request {reply.request_id}, not {rid}")
        self._check(flight, reply)
        reply = self._with_stop(flight, reply)
        version = sent_version if reply.policy_version is None else reply.policy_version
        if num_tokens and version < sent_version:
            await parts.distrust(worker)
            message = f"{worker.address}: answered from version {version}, {sent_version} is current"
            raise TryFailedError(Failure.STALE, message)
        parts.counters.sampled_tokens += num_tokens
        if parts.dialect.keeps_cache and reply.version_spans:
            parts.counters.stale_cache_tokens += num_tokens - reply.version_spans[0].end
        newest = max((span.policy_version for span in reply.version_spans), default=version)
        if num_tokens and newest > parts.weights.current_version:
            await parts.weights.meet_newer(parts.pool.owners(worker), newest)
        if num_tokens and not reply.version_spans:
            # When the weights changed under a request, which token saw which is not known: call them old.
            changed = parts.weights.current_version != sent_version or not parts.admission.is_open
            version = sent_version if changed else version
            reply = reply._replace(version_spans=(VersionSpan(0, num_tokens, version),))
        elif len(reply.version_spans) > 1 and parts.dialect.counts_late(parts.pool.owners(worker)):
            reply = reply._replace(version_spans=with_later_borders(reply.version_spans))
        self._note_cached(flight, worker, reply)
        return reply

    def _note_cached(self, flight: Flight, worker: Worker, reply: Reply) -> None:
        """Note what the server said that it had, and what it has from now on."""
        parts, spans = self._parts, reply.version_spans
        parts.counters.sent_tokens += len(flight.prompt_ids) + flight.num_sampled
        parts.counters.told_cached_tokens += reply.cached_tokens
        if len(spans) == 1 and parts.pool.is_remembered(worker, spans[0].policy_version):
            computed = np.concatenate([flight.input_ids, reply.token_ids])
            parts.pool.answered(worker, computed, policy_version=spans[0].policy_version)

    def _is_of_another(self, told: str, rid: str) -> bool:
        """Whether a reply is told to be of another request of this client; servers may put something around an id."""
        return rid not in told and (self._suffix in told or self._parts.dialect.repeats_ids)

    def _check(self, flight: Flight, reply: Reply) -> None:
        if not reply.is_exact:
            return
        num_sent = len(flight.prompt_ids) + flight.num_sampled
        if flight.shown is not None and reply.seen_pictures is not None:
            check_hashes(reply.seen_pictures, flight.shown.pictures)
            check_places(reply.seen_pictures, flight.shown.places)
        if len(reply.token_ids) and reply.prompt_tokens not in (None, num_sent):
            told = f"answers {reply.prompt_tokens} prompt tokens, {num_sent} were sent"
            if flight.shown is None:
                raise EngineProtocolError(told)
            if self._makes_text(flight, reply.prompt_tokens):
                raise EngineProtocolError(
                    f"{told}: it makes text of a prompt with pictures, which is tokenised otherwise than it was sampled"
                )
            raise PictureMismatchError(
                f"{told}: it has made more or less of {len(flight.shown.pictures)} pictures than the model's processor"
            )
        check_tokens(reply.token_ids, reply.logprobs, vocab_size=self._parts.vocab_size)
        check_finish(
            reply.finish_reason,
            num_prompt_tokens=num_sent,
            num_tokens=len(reply.token_ids),
            max_new_tokens=flight.remaining_tokens,
            context_length=self._parts.context_length,
        )

    def _with_stop(self, flight: Flight, reply: Reply) -> Reply:
        """Return a reply, with its text if that was made here; EngineProtocolError if it lacks what it stopped at."""
        if not isinstance(matched := reply.finish_reason.matched, str) or matched in (reply.text or ""):
            return reply
        ids = np.concatenate([*(part.token_ids for part in flight.parts), reply.token_ids])
        decode, skips = self._parts.tokenizer.decode, flight.params.skip_special_tokens
        text = decode(ids, skip_special_tokens=skips)
        if matched not in text and not (skips and matched in decode(ids, skip_special_tokens=False)):
            raise EngineProtocolError(f"stopped at {matched!r}, which its tokens do not have")
        return reply if flight.parts or reply.text is not None else reply._replace(text=text)

    def _makes_text(self, flight: Flight, num_told: int) -> bool:
        """Whether a server's number of tokens is that of the text of those sent, which a policy sampled otherwise."""
        tokenizer, sent_ids = self._parts.tokenizer, flight.sent_ids
        text = tokenizer.decode(sent_ids, skip_special_tokens=False)
        num_more = len(tokenizer.encode(text, add_special_tokens=False)) - len(sent_ids)
        return num_told == len(flight.prompt_ids) + flight.num_sampled + num_more

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
                owner.is_unsure = owner.is_unsure or (kind is Failure.CONNECTION and self._parts.dialect.is_alone)
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
