"""The engine that the pipeline sees: any number of servers of one kind as one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress

import numpy as np
from numpy.typing import NDArray

from rollfeed.completions import LARGEST_VOCABULARY
from rollfeed.engine.client.concurrency import Permits
from rollfeed.engine.client.connecting import connect
from rollfeed.engine.client.counters import Counters
from rollfeed.engine.client.dialect import Context, Dialect
from rollfeed.engine.client.dispatch import Dispatcher, DispatchParts
from rollfeed.engine.client.flights import Flight, FlightAbortedError, ShownPictures, Turnstile
from rollfeed.engine.client.monitor import Monitor
from rollfeed.engine.client.weights import ServerWeights
from rollfeed.engine.client.workers import Orphans, ServerPool
from rollfeed.engine.http import Http
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Engine, MetServer, PictureProcessor, ServerUpdate, Tokenizer, WeightTransport
from rollfeed.routing import AdaptiveLimit, Throughput
from rollfeed.types import (
    Completion,
    CompletionTimings,
    EngineLoad,
    FinishKind,
    FinishReason,
    FolderUpdate,
    Picture,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    TensorUpdate,
    WeightUpdate,
    joined_spans,
)

_ABORT_AGAIN_SECONDS = 0.2  # a request may have been on its way to the server when that was told to abort
_CLOSING_SECONDS = 2.0
_LONG_TOKENS = 4096
"""Of a response whose text is made beside the event loop."""


class ServerEngine(Engine):
    """Serves requests from servers, named one by one or found behind a router.

    Entering it waits until all of them are healthy and agree on a version; leaving it aborts what
    is still under way and closes every connection. It belongs to one event loop.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        context_length: int,
        tokenizer: Tokenizer,
        vocab_size: int = LARGEST_VOCABULARY,
        transport: WeightTransport | None = None,
        puts_back: bool = True,
        pictures: PictureProcessor | None = None,
    ) -> None:
        """Make an engine; nothing is connected before it is entered.

        ``context_length`` is that of prompt and response together; ``vocab_size`` the ids of the model, as far as that
        is known. The tokenizer makes the text of responses, which is never a server's. With ``puts_back`` the youngest
        requests of a server that cannot hold all leave it, and go on from their tokens when there is room. ``pictures``
        is of the model, if it takes any.
        """
        self.precision = "unknown"
        self.max_running_requests = dialect.settings.most_concurrency
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.is_exact = dialect.is_exact
        self.counters = Counters()
        self._dialect = dialect
        self._settings = dialect.settings
        self._tokenizer = tokenizer
        self._transport = transport
        self._flights: set[Flight] = set()
        self._has_none = asyncio.Event()
        self._throughput = Throughput()
        self._puts_back = puts_back and dialect.keeps_partial
        self._takes_images = False
        self._pictures = pictures
        self._is_open = False

    async def __aenter__(self) -> ServerEngine:
        dialect, settings = self._dialect, self._settings
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(
                Http(
                    api_key=dialect.api_key,
                    max_connections=settings.max_connections or self.max_running_requests,
                    control_timeout_seconds=settings.control_timeout_seconds,
                )
            )
            dialect.open(Context(self._http, self._tokenizer, self.context_length))
            servers = await connect(dialect)
            self.precision = servers.precision
            self._takes_images = all(each.takes_images for each in servers.found.values())
            if self._transport is not None:
                met = [MetServer(each, found.num_ranks, found.model_path) for each, found in servers.found.items()]
                self._transport.meet(met)
            self._pool = ServerPool(router=servers.router, counters=self.counters, routing=settings.routing)
            for address, found in servers.found.items():
                worker = self._pool.add(address, is_exact=found.is_exact)
                if servers.is_behind(found):
                    await self._pool.take_out(worker, f"serves {found.policy_version}, others {servers.policy_version}")
            self._orphans = Orphans(pool=self._pool, dialect=dialect, counters=self.counters)
            admission = Turnstile()
            self.weights = ServerWeights(
                pool=self._pool,
                dialect=dialect,
                http=self._http,
                counters=self.counters,
                admission=admission,
                orphans=self._orphans,
                policy_version=servers.policy_version,
            )
            monitor = Monitor(pool=self._pool, router=servers.router, dialect=dialect, weights=self.weights)
            self._start(stack, monitor, admission)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._stack.aclose()
        if self._transport is not None:
            self._transport.close()

    @property
    def policy_version(self) -> int:
        """The version that the next request will meet; 0 before the engine is entered."""
        return self.weights.current_version if self._is_open else 0

    async def generate(
        self, token_ids: NDArray[np.int32], params: SamplingParams, *, request_id: str, images: Sequence[Picture] = ()
    ) -> Completion:
        """Sample one response; see :class:`rollfeed.protocols.Engine`.

        SGLang ignores ``params.seed`` unless it runs with deterministic inference.

        Raises:
            EngineUnavailableError: If there is no answer in time, or after every try.
            EngineProtocolError: If the request or its reply breaks the contract.
        """
        self._check_open()
        self._dialect.check(params)
        self.counters.requests += 1
        prompt_ids = np.asarray(token_ids, np.int32)
        pictures = self._pictures if self._takes_images else None
        shown = await asyncio.to_thread(ShownPictures.of, prompt_ids, images, pictures) if images else None
        flight = Flight(request_id=request_id, prompt_ids=prompt_ids, params=params, shown=shown)
        self._permits.arrived(flight, flight.affinity.session)
        started = asyncio.get_running_loop().time()
        self._flights.add(flight)
        self._has_none.clear()
        try:
            if flight.remaining_tokens > 0:
                await self._dispatcher.answer(flight, timeout_seconds=self._settings.request_timeout_seconds)
        except FlightAbortedError:
            flight.finish = FinishReason(FinishKind.ABORT)
        except TimeoutError:
            self.counters.timed_out_requests += 1
            raise EngineUnavailableError(
                f"no answer within request_timeout_seconds = {self._settings.request_timeout_seconds:g}"
            ) from None
        finally:
            self._flights.discard(flight)
            self._permits.ended(flight, flight.affinity.session)
            if not self._flights:
                self._has_none.set()
            now = asyncio.get_running_loop().time()
            self._throughput.note(began=now - flight.served_seconds, ended=now, num_tokens=flight.num_sampled)
        if flight.aborted:
            self._check_open()
        return await self._completion(flight, now - started - flight.served_seconds, started)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request where it is, or with None everything that the servers work on."""
        self._check_open()
        chosen = [each for each in self._flights if request_id is None or each.request_id == request_id]
        for flight in chosen:
            flight.abort()
            if self._dialect.aborts_by_closing:
                flight.interrupt()
        if self._dialect.aborts_by_closing:
            return
        if request_id is None:
            await self._orphans.abort_all(self._pool.live)
            return
        async with asyncio.TaskGroup() as tasks:
            for flight in chosen:
                tasks.create_task(self._abort_one(flight))

    async def pause(self) -> None:
        """Hold every server between two tokens; requests stay where they are, and new ones wait here."""
        self._check_open()
        await self.weights.pause()

    async def resume(self) -> None:
        self._check_open()
        await self.weights.resume()

    async def apply(self, update: WeightUpdate) -> None:
        """Have every server load new weights; see :class:`rollfeed.protocols.Engine`."""
        self._check_open()
        if isinstance(update, TensorUpdate):
            if self._transport is None:
                raise EngineProtocolError("the engine was made without a transport for tensors: give it a folder")
            update = await self._transport.stage(update)
        if not isinstance(update, FolderUpdate | ServerUpdate):
            raise EngineProtocolError(f"servers take no {type(update).__name__}")
        await self.weights.update(update)

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return what every live server says of the texts, by its address; see :class:`rollfeed.protocols.Engine`."""
        self._check_open()
        if self.weights.is_paused:
            return {}
        workers, version = self._pool.live, self.weights.current_version
        scored = await asyncio.gather(
            *(self._dialect.score(worker.address, texts, policy_version=version) for worker in workers)
        )
        told = {worker.address: each for worker, each in zip(workers, scored, strict=True) if each is not None}
        for address, logprobs_N in told.items():
            if not np.isfinite(logprobs_N).all():
                raise EngineProtocolError(f"{address}: a token that it scored has no log-probability")
        return told

    async def load(self) -> EngineLoad:
        """Return how many requests the live servers run, and how many wait there or here."""
        self._check_open()
        at_servers = self._pool.num_flights
        waiting_here = len(self._flights) - at_servers
        told = await asyncio.gather(*(self._dialect.load(worker.address) for worker in self._pool.live))
        loads = [load for load in told if load is not None]
        if len(loads) < len(told):
            return EngineLoad(at_servers, waiting_here)
        return EngineLoad(
            sum(load.running for load in loads), sum(load.waiting for load in loads) + max(0, waiting_here)
        )

    async def health(self) -> None:
        """Return when at least one server may have requests, and says that it is healthy."""
        self._check_open()
        self._pool.check_hope()
        workers = self._pool.live
        if not workers:
            raise EngineUnavailableError(f"none of {len(self._pool.workers)} servers is healthy and up to date")
        if self.weights.is_holding:
            return  # paused servers say nothing
        seconds = self._settings.control_timeout_seconds
        asked = (self._dialect.health(worker.address, timeout_seconds=seconds) for worker in workers)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        if len(errors) == len(workers):
            raise errors[0]

    def metrics(self) -> Mapping[str, float]:
        """Return totals since the start, and what is so now."""
        if not self._is_open:
            return self.counters.totals()
        return {
            **self.counters.totals(),
            **self.weights.costs.metrics(),
            #: engine/stale_cache_share: of the tokens so far, those decoded on keys and values of older weights
            "stale_cache_share": self.counters.stale_cache_tokens / max(1, self.counters.sampled_tokens),
            **self._pool.metrics(),
            #: engine/tokens_in_flight: tokens of these so far, where servers stream them
            "tokens_in_flight": float(sum(each.answer.num_tokens for each in self._flights if each.answer)),
            #: engine/concurrency_limit: requests that may be at the servers
            "concurrency_limit": float(self._permits.limit),
            #: engine/orphans: requests given up that no server has confirmed yet
            "orphans": float(len(self._orphans.outstanding)),
            #: engine/orphans_max_tokens: tokens that those may still cost, at most
            "orphans_max_tokens": float(sum(self._orphans.outstanding.values())),
        }

    async def _abort_one(self, flight: Flight) -> None:
        rid = flight.rid
        while rid and flight.rid == rid:
            if not await self._orphans.tell(self._pool.owners(flight.worker), rid):
                return
            if self.weights.is_paused:
                return  # a paused server answers when it goes on
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_SECONDS):
                    await flight.landing()

    async def _completion(self, flight: Flight, queue_seconds: float, started: float) -> Completion:
        parts = flight.parts if flight.approximate is None else [flight.approximate]
        if len(parts) == 1:
            token_ids, logprobs = parts[0].token_ids, parts[0].logprobs
        else:
            token_ids = np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)])
            logprobs = np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)])
        text = parts[0].text if len(parts) == 1 else None
        if text is None:
            text = await self._text(flight, token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=text,
            finish_reason=self._finish_reason(flight, token_ids, text),
            version_spans=joined_spans((len(part.token_ids), part.version_spans) for part in parts),
            precision=self.precision,
            prompt_tokens=len(flight.prompt_ids),
            cached_tokens=parts[0].cached_tokens if parts else 0,
            timings=CompletionTimings(queue_seconds, asyncio.get_running_loop().time() - started),
            sampling_mask=SamplingMask.joined([part.sampling_mask for part in parts if part.sampling_mask])
            if flight.params.return_sampling_mask
            else None,
            routed_experts=RoutedExperts.joined(part.routed_experts for part in parts),
        )

    async def _text(self, flight: Flight, token_ids: NDArray[np.int32]) -> str:
        def decode() -> str:
            return self._tokenizer.decode(token_ids, skip_special_tokens=flight.params.skip_special_tokens)

        if len(token_ids) < _LONG_TOKENS or not self._is_open:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._dispatcher.decoding, decode)

    def _finish_reason(self, flight: Flight, token_ids: NDArray[np.int32], text: str) -> FinishReason:
        finish, params = flight.finish, flight.params
        if finish is None or (finish.kind is FinishKind.ABORT and flight.remaining_tokens <= 0):
            return FinishReason(FinishKind.LENGTH)  # there was nothing left to sample
        if finish.kind is not FinishKind.STOP or finish.matched is not None:
            return finish
        # Some servers do not name the end-of-sequence token, and on some routes nothing else either.
        last = int(token_ids[-1]) if len(token_ids) else None
        if last is not None and last in (*self._tokenizer.eos_token_ids, *params.stop_token_ids):
            return FinishReason(FinishKind.STOP, last)
        return FinishReason(FinishKind.STOP, next((stop for stop in params.stop if text.endswith(stop)), None))

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineUnavailableError("the engine is not started: enter it with 'async with'")

    def _start(self, stack: AsyncExitStack, monitor: Monitor, admission: Turnstile) -> None:
        settings, limit = self._settings, None
        if settings.fixed_concurrency is None:
            limit = AdaptiveLimit(num_workers=len(self._pool.workers), ceiling=settings.most_concurrency)
        self._permits = Permits(settings.most_concurrency if limit is None else limit.limit)

        def refused() -> None:
            if limit is not None:
                limit.refused()
                self._permits.set_limit(limit.limit)

        self._dispatcher = Dispatcher(
            DispatchParts(
                http=self._http,
                dialect=self._dialect,
                pool=self._pool,
                orphans=self._orphans,
                counters=self.counters,
                admission=admission,
                weights=self.weights,
                distrust=monitor.distrust,
                refused=refused,
                permits=self._permits,
                context_length=self.context_length,
                vocab_size=self.vocab_size,
                pictures=self._pictures,
                tokenizer=self._tokenizer,
            ),
            max_tries=settings.max_tries,
        )
        stack.callback(self._dispatcher.close)
        stack.push_async_callback(self._leave)
        orphans = self._orphans if self._puts_back else None
        monitor.start(limit=limit, permits=self._permits, throughput=self._throughput, orphans=orphans)
        stack.push_async_callback(monitor.close)

    async def _leave(self) -> None:
        """Abort what is under way: nobody will take its answer."""
        flights = tuple(self._flights)
        for flight in flights:
            flight.abort()
            flight.interrupt()
        if flights:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_SECONDS):
                    await self._has_none.wait()
        await self._orphans.close(grace_seconds=_CLOSING_SECONDS)
