"""New weights for every server, from a folder that all of them can read.

Invariant: no request is sent between the moment an update begins and the moment every worker that
may have requests has confirmed the new version.

A prefix cache cannot be flushed under running requests: old servers (0.5.15) exit when an update tries
it, newer ones (0.5.23) say that it failed and have changed the weights. So an update either empties the servers
first (``abort``: what ran goes on afterwards from the tokens it has), or has them put back what runs and
flushes when the weights are there (``retract``), or keeps the cache unless nothing runs (``in_place``). A pause
of SGLang's mode ``abort`` is not used: it looks once a second whether it is done. A paused server ends no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollfeed.config.engine import WeightUpdateMode
from rollfeed.engine.http import Http
from rollfeed.engine.sglang.counters import Counters
from rollfeed.engine.sglang.flights import Turnstile
from rollfeed.engine.sglang.workers import Orphans, Worker, WorkerPool, read_load, read_version
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_LANDING_SECONDS = 1.0
"""For the partial replies of an emptied server."""


class WeightUpdater:
    """Keeps all workers at one version."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        http: Http,
        counters: Counters,
        admission: Turnstile,
        mode: WeightUpdateMode,
        timeout_seconds: float,
        orphans: Orphans,
    ) -> None:
        self.current_version = 0
        self.is_updating = False
        self.is_paused = False
        """By the caller; an update leaves the engines so."""
        self.num_holds = 0
        """Pauses and updates begun so far."""
        self._pool = pool
        self._http = http
        self._counters = counters
        self._admission = admission
        self._mode = mode
        self._holding = {"mode": "retract" if mode is WeightUpdateMode.RETRACT else "in_place"}
        self._timeout_seconds = timeout_seconds
        self._orphans = orphans
        self._folder: Path | None = None
        self._lock = asyncio.Lock()

    @property
    def is_holding(self) -> bool:
        """Whether servers may be paused, or busy with new weights: they say nothing of their health then."""
        return self.is_paused or self.is_updating

    async def pause(self) -> None:
        """Hold every worker between two tokens.

        Raises:
            EngineError: If one does not confirm.
        """
        async with self._lock:
            self._admission.set_open(False)
            self.is_paused = True
            self.num_holds += 1
            for outcome in await self._all("/pause_generation", self._holding):
                if isinstance(outcome, EngineError):
                    raise outcome

    async def resume(self) -> None:
        """Let every worker go on; one that does not confirm, perhaps because it died meanwhile, is taken out.

        Raises:
            EngineUnavailableError: If no worker is left.
        """
        async with self._lock:
            workers = self._pool.live
            outcomes = await self._all("/continue_generation", {})
            self.is_paused = False
            self._admission.set_open(True)
            for worker, outcome in zip(workers, outcomes, strict=True):
                if isinstance(outcome, EngineError):
                    await self._pool.take_out(worker, f"it does not go on after a pause: {outcome}")
                    if not self._pool.live:
                        raise EngineUnavailableError(f"no worker goes on after a pause: {outcome}")

    async def update(self, folder: Path, *, policy_version: int) -> None:
        """Have every live worker serve the weights of a folder.

        A worker that fails is taken out, and comes back when it has them.

        Raises:
            EngineProtocolError: If all workers refuse the weights; they serve the old ones.
            EngineUnavailableError: If no worker is left.
        """
        async with self._lock:
            self.is_updating = True
            self.num_holds += 1
            self._admission.set_open(False)
            try:
                await self._update_all(folder, policy_version)
            finally:
                self.is_updating = False
                self._admission.set_open(not self.is_paused)

    async def readmit(self, worker: Worker) -> None:
        """Bring a healthy worker to the current version and let it have requests.

        Raises:
            EngineError: If it does not get there.
        """
        async with self._lock:
            version = await read_version(worker.address, http=self._http)
            if version != self.current_version:
                if self._folder is None:
                    raise EngineUnavailableError(
                        f"{worker.address}: serves version {version}, not {self.current_version}, and no weights have "
                        "been published from here"
                    )
                await self._load(worker, self._folder, self.current_version, flush_cache=True, abort=True)
            known = tuple(self._orphans.outstanding)
            await self._http.command(f"{worker.address}/abort_request", {"abort_all": True})
            self._orphans.clear(known, at=[worker])
            await self._http.command(f"{worker.address}/continue_generation", {})
            if self.is_paused:
                await self._http.command(f"{worker.address}/pause_generation", self._holding)
            await self._pool.readmit(worker)

    def adopt(self, policy_version: int) -> None:
        """Take over a version that somebody else has published to all workers."""
        _log.warning("all workers serve version %d, published by somebody else", policy_version)
        self.current_version, self._folder = policy_version, None

    async def _update_all(self, folder: Path, version: int) -> None:
        workers = self._pool.live
        outcomes = await asyncio.gather(
            *(self._update_one(worker, folder, version) for worker in workers), return_exceptions=True
        )
        failed: list[tuple[Worker, EngineError]] = []
        for worker, outcome in zip(workers, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                failed.append((worker, outcome))
            elif outcome is not None:
                raise outcome
        if workers and len(failed) == len(workers) and all(isinstance(e, EngineProtocolError) for _, e in failed):
            raise EngineProtocolError(f"weights not taken: {failed[0][1]}")
        self.current_version, self._folder = version, folder
        for worker, error in failed:
            await self._pool.take_out(worker, f"weight update failed: {error}")
        if not self._pool.live:
            reason = failed[0][1] if failed else "none was alive"
            raise EngineUnavailableError(f"no worker has version {version}: {reason}")
        self._counters.weight_updates += 1

    async def _update_one(self, worker: Worker, folder: Path, version: int) -> None:
        if self._mode is WeightUpdateMode.ABORT:
            await self._update_emptied(worker, folder, version)
            return
        if not self.is_paused:
            await self._http.command(f"{worker.address}/pause_generation", self._holding)
        try:
            await self._load(worker, folder, version, flush_cache=False, abort=False)
            # Apart from the update: a server that cannot do it now says so, instead of ending. In place it can if idle.
            reply = await self._http.control("POST", f"{worker.address}/flush_cache")
            if reply.status != 200 and self._mode is WeightUpdateMode.RETRACT:
                _log.warning("%s: goes on with keys and values of older weights: it does not flush", worker.address)
        finally:
            if not self.is_paused:
                await self._http.command(f"{worker.address}/continue_generation", {})

    async def _update_emptied(self, worker: Worker, folder: Path, version: int) -> None:
        if self.is_paused:
            await self._http.command(f"{worker.address}/continue_generation", {})
        try:
            await self._until_idle(worker)
            await self._load(worker, folder, version, flush_cache=True, abort=True)
        finally:
            if self.is_paused:
                await self._http.command(f"{worker.address}/pause_generation", self._holding)

    async def _load(self, worker: Worker, folder: Path, version: int, *, flush_cache: bool, abort: bool) -> None:
        reply = await self._http.command(
            f"{worker.address}/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": str(version),
                "flush_cache": flush_cache,
                "abort_all_requests": abort,
            },
            timeout_seconds=self._timeout_seconds,
        )
        content = reply.json()
        if content.get("success") is not True:
            raise EngineProtocolError(f"{worker.address}: {content.get('message', 'no success')}")
        served = await read_version(worker.address, http=self._http)
        if served != version:
            raise EngineProtocolError(f"{worker.address}: serves version {served} after an update to {version}")

    async def _until_idle(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        given_up_at = loop.time() + _LANDING_SECONDS
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._http.command(f"{worker.address}/abort_request", {"abort_all": True})
                while worker.flights or not await self._is_idle(worker):
                    await asyncio.sleep(_POLL_SECONDS)
                    # What was on its way then has arrived since.
                    await self._http.command(f"{worker.address}/abort_request", {"abort_all": True})
                    if loop.time() > given_up_at:
                        for flight in tuple(worker.flights):
                            flight.interrupt()
        except TimeoutError:
            raise EngineUnavailableError(f"{worker.address}: still works on aborted requests") from None

    async def _is_idle(self, worker: Worker) -> bool:
        load = await read_load(worker.address, http=self._http)
        return load is None or load.running + load.waiting == 0

    async def _all(self, path: str, body: Mapping[str, str]) -> Sequence[object]:
        outcomes = await asyncio.gather(
            *(self._http.command(worker.address + path, body) for worker in self._pool.live), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome
        return outcomes
