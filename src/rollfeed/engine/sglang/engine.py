"""The engine that the pipeline sees: any number of SGLang servers as one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.api_key import ApiKey
from rollfeed.config.engine import SGLangSettings, WeightUpdateMode
from rollfeed.config.paths import expand_path
from rollfeed.engine.http import Http
from rollfeed.engine.sglang.concurrency import AdaptiveLimit, Permits, Throughput
from rollfeed.engine.sglang.connecting import connect
from rollfeed.engine.sglang.counters import Counters
from rollfeed.engine.sglang.dispatch import Dispatcher, DispatchParts
from rollfeed.engine.sglang.flights import Flight, FlightAbortedError, Turnstile
from rollfeed.engine.sglang.monitor import Monitor, ProbePlan
from rollfeed.engine.sglang.scoring import score_texts
from rollfeed.engine.sglang.weights import WeightUpdater
from rollfeed.engine.sglang.workers import Orphans, Worker, WorkerPool, abort_at, read_load
from rollfeed.engine.weight_folders import WeightFolders
from rollfeed.engine.weight_versions import joined_spans
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Engine, Tokenizer
from rollfeed.types import (
    Completion,
    CompletionTimings,
    EngineLoad,
    FinishKind,
    FinishReason,
    SamplingMask,
    SamplingParams,
)

_ABORT_AGAIN_SECONDS = 0.2  # a request may have been on its way to the server when that was told to abort
_CLOSING_SECONDS = 2.0


class SGLangEngine(Engine):
    """Serves requests from SGLang servers, named one by one or found behind a router.

    Entering it waits until all of them are healthy and agree on a version; leaving it aborts what
    is still under way and closes every connection. It belongs to one event loop.
    """

    def __init__(
        self, settings: SGLangSettings, *, context_length: int, tokenizer: Tokenizer, checkpoint: Path | None = None
    ) -> None:
        """Make an engine; nothing is connected before it is entered.

        Args:
            settings: Where the servers are, and how patient to be with them.
            context_length: Of prompt and response together.
            tokenizer: For the text of responses that took several tries.
            checkpoint: Folder whose configuration and tokenizer go with published weights.

        Raises:
            ConfigError: If the variable that should hold the key does not.
        """
        self.precision = "unknown"
        self.max_running_requests = settings.concurrency or settings.max_concurrency
        self.context_length = context_length
        self.counters = Counters()
        self._settings = settings
        self._api_key = ApiKey.read(settings.api_key_env, setting="engine.sglang.api_key_env")
        self._tokenizer = tokenizer
        self._flights: set[Flight] = set()
        self._has_none = asyncio.Event()
        self._throughput = Throughput()
        self._takes_images = False
        self._is_open = False
        self._folders = WeightFolders(
            None if settings.weights_folder is None else Path(expand_path(settings.weights_folder)),
            checkpoint=checkpoint,
        )

    async def __aenter__(self) -> SGLangEngine:
        settings = self._settings
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(
                Http(
                    api_key=self._api_key,
                    max_connections=settings.max_connections or self.max_running_requests,
                    control_timeout_seconds=settings.control_timeout_seconds,
                )
            )
            servers = await connect(settings, http=self._http, context_length=self.context_length)
            self.precision = servers.precision
            self._takes_images = servers.takes_images
            self._router = servers.router
            self._pool = WorkerPool(router=servers.router, counters=self.counters)
            for address in servers.addresses:
                self._pool.add(address, is_live=True, is_exact=address in servers.exact)
            self._orphans = Orphans(pool=self._pool, http=self._http, counters=self.counters)
            self._admission = Turnstile()
            self._weights = WeightUpdater(
                pool=self._pool,
                http=self._http,
                counters=self.counters,
                admission=self._admission,
                mode=settings.weight_update,
                timeout_seconds=settings.update_timeout_seconds,
                orphans=self._orphans,
            )
            self._weights.current_version = servers.policy_version
            self._start(stack)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._stack.aclose()
        self._folders.close()

    @property
    def policy_version(self) -> int:
        """The version that the next request will meet; 0 before the engine is entered."""
        return self._weights.current_version if self._is_open else 0

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        params: SamplingParams,
        *,
        request_id: str,
        images: Sequence[str] = (),
    ) -> Completion:
        """Sample one response; see :class:`rollfeed.protocols.Engine`.

        Servers ignore ``params.seed`` unless they run with deterministic inference.

        Raises:
            EngineUnavailableError: If there is no answer in time, or after every try.
            EngineProtocolError: If the request or its reply breaks the contract.
        """
        self._check_open()
        if images and not self._takes_images:
            raise EngineProtocolError("the servers' model takes text only, no images")
        self.counters.requests += 1
        prompt_ids = np.asarray(token_ids, np.int32)
        flight = Flight(request_id=request_id, prompt_ids=prompt_ids, params=params, images=images)
        started = asyncio.get_running_loop().time()
        queued = 0.0
        self._flights.add(flight)
        self._has_none.clear()
        try:
            if flight.remaining_tokens > 0:
                await self._permits.acquire(flight)
                queued = asyncio.get_running_loop().time() - started
                try:
                    # From here on, as the wait for a permit ends with the deadlines of those before.
                    async with asyncio.timeout(self._settings.request_timeout_seconds):
                        await self._dispatcher.answer(flight)
                finally:
                    self._permits.release()
        except FlightAbortedError:
            self._check_open()
            return self._completion(flight, FinishReason(FinishKind.ABORT), queued, started)
        except TimeoutError:
            self.counters.timed_out_requests += 1
            raise EngineUnavailableError(
                f"no answer within request_timeout_seconds = {self._settings.request_timeout_seconds:g}"
            ) from None
        finally:
            self._flights.discard(flight)
            if not self._flights:
                self._has_none.set()
            now = asyncio.get_running_loop().time()
            self._throughput.note(began=started + queued, ended=now, num_tokens=flight.num_sampled)
        return self._completion(flight, None, queued, started)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request where it is, or with None everything that the servers work on."""
        self._check_open()
        chosen = [each for each in self._flights if request_id is None or each.request_id == request_id]
        for flight in chosen:
            flight.abort()
        if request_id is None:
            await self._abort_all()
            return
        async with asyncio.TaskGroup() as tasks:
            for flight in chosen:
                tasks.create_task(self._abort_one(flight))

    async def pause(self) -> None:
        """Hold every server between two tokens; requests stay where they are, and new ones wait here."""
        self._check_open()
        await self._weights.pause()

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._check_open()
        await self._weights.resume()

    async def update_weights(self, tensors: Mapping[str, Any], *, policy_version: int) -> None:
        """Write the tensors as a checkpoint and have every server load it.

        Args:
            tensors: All of the model's, numpy or torch, by the checkpoint's names.
            policy_version: What the servers report from now on.

        Raises:
            EngineProtocolError: If the weights cannot be written, or every server refuses them.
            EngineUnavailableError: If no server is left that has them.
        """
        self._check_open()
        folder = await asyncio.to_thread(self._folders.write, tensors, policy_version=policy_version)
        await self._weights.update(folder, policy_version=policy_version)

    async def update_weights_from_disk(self, folder: Path, *, policy_version: int) -> None:
        """Have every server load a checkpoint that all of them can read; raises as :meth:`update_weights`."""
        self._check_open()
        await self._weights.update(folder, policy_version=policy_version)

    async def score(self, texts: Sequence[NDArray[np.int32]]) -> Mapping[str, NDArray[np.float64]]:
        """Return what every live server says of the texts, by its address; see :class:`rollfeed.protocols.Engine`."""
        self._check_open()
        if self._weights.is_paused:
            return {}
        workers, version = self._pool.live, self._weights.current_version
        scored = await asyncio.gather(
            *(
                score_texts(
                    worker.address,
                    texts,
                    policy_version=version,
                    http=self._http,
                    timeout_seconds=self._settings.update_timeout_seconds,
                )
                for worker in workers
            )
        )
        return {worker.address: logprobs_N for worker, logprobs_N in zip(workers, scored, strict=True)}

    async def load(self) -> EngineLoad:
        """Return how many requests the live servers run, and how many wait there or here."""
        self._check_open()
        waiting_here = len(self._flights) - self._permits.num_taken
        told = await asyncio.gather(*(read_load(worker.address, http=self._http) for worker in self._pool.live))
        loads = [load for load in told if load is not None]
        if len(loads) < len(told):
            return EngineLoad(self._permits.num_taken, waiting_here)
        return EngineLoad(
            sum(load.running for load in loads), sum(load.waiting for load in loads) + max(0, waiting_here)
        )

    async def health(self) -> None:
        """Return when at least one server may have requests."""
        self._check_open()
        if not self._pool.live:
            raise EngineUnavailableError(f"none of {len(self._pool.workers)} servers is healthy and up to date")

    def metrics(self) -> Mapping[str, float]:
        """Return totals since the start, and what is so now."""
        if not self._is_open:
            return self.counters.totals()
        return {
            **self.counters.totals(),
            #: engine/live_workers: servers that may have requests
            "live_workers": float(len(self._pool.live)),
            #: engine/requests_in_flight: requests at the servers
            "requests_in_flight": float(sum(1 for _ in self._pool.flights)),
            #: engine/concurrency_limit: requests that may be at the servers
            "concurrency_limit": float(self._permits.limit),
            #: engine/orphans: requests given up that no server has confirmed yet
            "orphans": float(len(self._orphans.outstanding)),
            #: engine/orphans_max_tokens: tokens that those may still cost, at most
            "orphans_max_tokens": float(sum(self._orphans.outstanding.values())),
        }

    async def _abort_all(self) -> None:
        live = self._pool.live
        known = tuple(self._orphans.outstanding)
        if await abort_at(live, {"abort_all": True}, http=self._http, counters=self.counters):
            self._orphans.clear(known, at=live)

    async def _abort_one(self, flight: Flight) -> None:
        rid = flight.rid
        while rid and flight.rid == rid:
            owners = self._pool.owners(flight.worker)
            if not await abort_at(owners, {"rid": rid}, http=self._http, counters=self.counters):
                return
            if self._weights.is_paused:
                return  # a paused server answers when it goes on
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_SECONDS):
                    await flight.landing()

    def _completion(
        self, flight: Flight, finish_reason: FinishReason | None, queue_seconds: float, started: float
    ) -> Completion:
        parts = flight.parts
        if finish_reason is None:
            # Without a part, or with its budget spent before an abort, there was nothing left to sample.
            ended = bool(parts) and (
                parts[-1].finish_reason.kind is not FinishKind.ABORT or flight.remaining_tokens > 0
            )
            finish_reason = parts[-1].finish_reason if ended else FinishReason(FinishKind.LENGTH)
        if len(parts) == 1:
            token_ids, logprobs, text = parts[0].token_ids, parts[0].logprobs, parts[0].text
        else:
            token_ids = np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)])
            logprobs = np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)])
            text = self._tokenizer.decode(token_ids, skip_special_tokens=flight.params.skip_special_tokens)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            text=text,
            finish_reason=finish_reason,
            version_spans=joined_spans((len(part.token_ids), part.version_spans) for part in parts),
            precision=self.precision,
            prompt_tokens=len(flight.prompt_ids),
            cached_tokens=parts[0].cached_tokens if parts else 0,
            timings=CompletionTimings(queue_seconds, asyncio.get_running_loop().time() - started),
            sampling_mask=SamplingMask.joined([part.sampling_mask for part in parts if part.sampling_mask])
            if flight.params.return_sampling_mask
            else None,
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineUnavailableError("the engine is not started: enter it with 'async with'")

    def _start(self, stack: AsyncExitStack) -> None:
        settings, num_workers = self._settings, len(self._pool.workers)
        limit = None
        if settings.concurrency is None:
            limit = AdaptiveLimit(num_workers=num_workers, ceiling=settings.max_concurrency)
        self._permits = Permits(settings.concurrency or settings.max_concurrency if limit is None else limit.limit)

        def refused() -> None:
            if limit is not None:
                limit.refused()
                self._permits.set_limit(limit.limit)

        monitor = Monitor(
            pool=self._pool,
            router=self._router,
            http=self._http,
            weights=self._weights,
            plan=ProbePlan(settings.probe_interval_seconds, settings.probe_timeout_seconds, settings.probes_until_dead),
        )
        self._dispatcher = Dispatcher(
            DispatchParts(
                http=self._http,
                pool=self._pool,
                orphans=self._orphans,
                counters=self.counters,
                admission=self._admission,
                current_version=lambda: self._weights.current_version,
                counts_late=self._counts_late,
                distrust=monitor.distrust,
                refused=refused,
            ),
            max_tries=settings.max_tries,
        )
        stack.callback(self._dispatcher.close)
        stack.push_async_callback(self._leave)
        monitor.start(limit=limit, permits=self._permits, throughput=self._throughput)
        stack.push_async_callback(monitor.close)

    def _counts_late(self, worker: Worker) -> bool:
        owners = self._pool.owners(worker)
        is_in_place = self._settings.weight_update is WeightUpdateMode.IN_PLACE
        return is_in_place and not all(owner.is_exact for owner in owners)

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
