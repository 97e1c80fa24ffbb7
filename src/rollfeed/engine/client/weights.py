"""New weights for every server, and pauses.

Servers prepare for an update while they serve; then the gate closes, they load it, and the gate opens.

Invariant: no request is sent between the moment the gate closes and the moment every worker that
may have requests has confirmed the new version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rollfeed.engine.client.counters import Counters, UpdateCosts
from rollfeed.engine.client.dialect import Dialect
from rollfeed.engine.client.flights import Turnstile, Worker
from rollfeed.engine.client.workers import Orphans, ServerPool, empty, errors_of
from rollfeed.engine.http import Failure, Http, TryFailedError
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import PreparedUpdate
from rollfeed.types import FolderUpdate, WeightUpdate

_log = logging.getLogger(__name__)

_TIMES_LATER = 4.0
"""As long as half of the servers took, a late one may take at least."""


class _Patience:
    """Waits for servers, and not much longer for the last ones than for half of them."""

    def __init__(self, num_servers: int, *, late_seconds: float) -> None:
        self._num_servers = num_servers
        self._late_seconds = late_seconds
        self._num_done = 0
        self._began = asyncio.get_running_loop().time()
        self._until: float | None = None
        self._waiting: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def of(self, worker: Worker) -> AsyncIterator[None]:
        """Raise EngineUnavailableError where what is done for a worker does not end in time."""
        try:
            async with asyncio.timeout_at(self._until) as timeout:
                self._waiting.add(timeout)
                try:
                    yield
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{worker.address}: is not done with new weights, long after {self._num_done} of {self._num_servers} "
                "servers were"
            ) from None
        self._num_done += 1
        if self._until is None and 2 * self._num_done >= self._num_servers:
            now = asyncio.get_running_loop().time()
            self._until = now + max(self._late_seconds, _TIMES_LATER * (now - self._began))
            for timeout in self._waiting:
                timeout.reschedule(self._until)


class ServerWeights:
    """Keeps all workers at one version."""

    def __init__(
        self,
        *,
        pool: ServerPool,
        dialect: Dialect,
        http: Http,
        counters: Counters,
        admission: Turnstile,
        orphans: Orphans,
        policy_version: int,
    ) -> None:
        self.current_version = policy_version
        """What the next request meets."""
        self.is_updating = False
        self.is_paused = False
        """By the caller; an update leaves the engines so."""
        self.is_resting = False
        """Somebody else may do with the servers as they like; they are not looked after."""
        self.num_holds = 0
        """Pauses and updates begun so far."""
        self.costs = UpdateCosts()
        self._pool = pool
        self._dialect = dialect
        self._http = http
        self._counters = counters
        self._admission = admission
        self._orphans = orphans
        self._published: WeightUpdate | None = None
        self._may_go_back = True
        """Whether the servers' version is one that an earlier process has left."""
        self._lock = asyncio.Lock()
        self._publishing = asyncio.Lock()
        """Held around the other one: versions are published one after the other."""
        self._rebuilding: asyncio.Timeout | None = None
        """Of the server that is given weights while it is out."""

    @property
    def is_holding(self) -> bool:
        """Whether servers may be paused, or busy with new weights: they say nothing of their health then."""
        return self.is_paused or self.is_updating or self.is_resting

    async def pause(self) -> None:
        """Hold every worker between two tokens; what runs where that cannot be done goes on afterwards.

        Raises:
            EngineError: If one does not confirm.
        """
        async with self._lock:
            self._admission.set_open(False)
            self.is_paused = True
            self.num_holds += 1
            for outcome in await errors_of(map(self._hold, self._pool.live)):
                if outcome is not None:
                    raise outcome

    async def resume(self) -> None:
        """Let every worker go on; one that does not confirm, perhaps because it died meanwhile, is taken out.

        Raises:
            EngineUnavailableError: If no worker is left.
        """
        async with self._lock:
            workers = self._pool.live
            outcomes = await errors_of(self._dialect.release(worker.address) for worker in workers)
            self.is_paused = False
            self._admission.set_open(True)
            for worker, outcome in zip(workers, outcomes, strict=True):
                if outcome is not None:
                    await self._pool.take_out(worker, f"it does not go on after a pause: {outcome}")
                    if not self._pool.live:
                        raise EngineUnavailableError(f"no worker goes on after a pause: {outcome}")

    async def update(self, update: WeightUpdate) -> None:
        """Have every live worker serve new weights; where none is live, those that answer.

        A worker that fails is taken out, and comes back when it has them. Only the first update may have a version
        below the servers', which an earlier process has left there: what comes later is above.

        Raises:
            EngineProtocolError: If all workers refuse the weights, or somebody else publishes to them; they serve the
                old ones.
            EngineUnavailableError: If no worker is left.
        """
        async with self._publishing:
            workers, began = self._pool.live, asyncio.get_running_loop().time()
            await self._check_version(workers, update.policy_version)
            self.costs = UpdateCosts()
            prepared = await self._prepare_all(workers, update)
            now = asyncio.get_running_loop().time()
            self.costs.prepare_seconds = now - began
            if self._rebuilding is not None:  # a server that hangs in older weights holds up no newer ones
                self._rebuilding.reschedule(now + self._dialect.settings.late_update_seconds)
            async with self._lock:
                self.is_updating = True
                self.num_holds += 1
                self._admission.set_open(False)
                try:
                    await self._update_all(update, prepared)
                finally:
                    self.is_updating = False
                    self._admission.set_open(not self.is_paused)

    def rest(self) -> None:
        """Look after no server, and send none a request, until :meth:`look_after` or :meth:`wake`."""
        self.is_resting = True
        self.num_holds += 1
        self._admission.set_open(False)

    def look_after(self) -> None:
        """Go on after :meth:`rest`, with servers as they were."""
        self.is_resting = False
        self._admission.set_open(not self.is_paused)

    async def wake(self) -> None:
        """Take over the newest version that a server has by now; those that lag behind are taken out.

        A server that was out and has it now is soon looked at, and has requests then.

        Raises:
            EngineUnavailableError: If no server says its version.
        """
        async with self._lock:
            workers = self._pool.workers
            asked = (self._dialect.version(worker.address) for worker in workers)
            told = await asyncio.gather(*asked, return_exceptions=True)
            versions = [each for each in told if isinstance(each, int)]
            if not versions:
                problem = told[0] if told else "the router lists none"
                raise EngineUnavailableError(f"none of {len(workers)} servers tells its version: {problem}")
            if max(versions) != self.current_version:
                self._take_over(max(versions), None)
            for worker, version in zip(workers, told, strict=True):
                if version != self.current_version:
                    await self._pool.take_out(worker, f"it serves version {version}, {self.current_version} is current")
                if not worker.is_live:
                    worker.suspected.set()
            self.look_after()

    async def readmit(self, worker: Worker) -> None:
        """Bring a healthy worker to the current version and let it have requests.

        Raises:
            EngineError: If it does not get there.
        """
        async with self._lock:
            if worker.is_live:
                return
            try:
                async with asyncio.timeout(None) as self._rebuilding:
                    await self._readmit(worker, must_reload=worker.must_reload or worker.problem is not None)
            except TimeoutError:
                raise EngineUnavailableError(f"{worker.address}: took so long that newer weights have come") from None
            finally:
                self._rebuilding = None

    async def assure(self, worker: Worker) -> None:
        """Ask a worker for its version that may have lost its weights; where it has, it is taken out and given them.

        Raises:
            TryFailedError: If it does not answer.
        """
        async with self._lock:
            if not (worker.is_unsure and worker.is_live):
                return
            try:
                told = await self._dialect.version(worker.address)
            except EngineUnavailableError as error:
                raise TryFailedError(Failure.CONNECTION, str(error)) from error
            worker.is_unsure = False
            if told is not None and told < self.current_version:
                worker.suspected.set()
                await self._pool.take_out(worker, f"serves version {told}, {self.current_version} is current")

    async def meet_newer(self, workers: Sequence[Worker], version: int) -> None:
        """Take over a version that a server names and nobody here has published, when all servers serve it.

        Raises:
            EngineProtocolError: If none of ``workers``, of which one has named it, does.
            TryFailedError: If not all servers do yet.
        """
        async with self._lock:  # an update under way may be what it is of
            if version <= self.current_version:
                return
            try:
                asked = [await self._dialect.version(worker.address) for worker in workers]
                told = [await self._dialect.version(worker.address) for worker in self._pool.live]
            except EngineUnavailableError as error:
                raise TryFailedError(Failure.CONNECTION, str(error)) from error
            if not any(each is not None and each >= version for each in asked):
                raise EngineProtocolError(
                    f"tokens of version {version}, {self.current_version} is the newest published"
                )
            known = [each for each in told if each is not None]
            if len(known) < len(told) or not known or min(known) < version:
                raise TryFailedError(Failure.AHEAD, f"tokens of version {version}, which not all servers have yet")
            _log.warning("all workers serve version %d, published by somebody else", min(known))
            self._take_over(min(known), None)

    async def _check_version(self, workers: Sequence[Worker], version: int) -> None:
        """Refuse a version that would go back, and servers to which somebody else publishes."""
        current, remedy = self.current_version, "stop the other trainer, or give this run servers of its own"
        seconds = self._dialect.settings.probe_timeout_seconds
        asked = (self._dialect.version(worker.address, timeout_seconds=seconds) for worker in workers)
        for worker, told in zip(workers, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(told, int) and told > current:  # what else is wrong with it shows when it is told to load
                raise EngineProtocolError(
                    f"version {version} not published: {worker.address} serves version {told}, and {current} is the "
                    f"newest that it had from here: {remedy}"
                )
        if version < current and not self._may_go_back:
            by_whom = "" if self._published is not None else f" from somebody else: {remedy}; or"
            raise EngineProtocolError(
                f"version {version} not published: the servers have {current}{by_whom}: give it a higher number"
            )
        if version < current:
            _log.warning("the servers have version %d of an earlier run; they go back to %d", current, version)

    async def _prepare_all(
        self, workers: Sequence[Worker], update: WeightUpdate
    ) -> Mapping[Worker, EngineError | None]:
        patience = _Patience(len(workers), late_seconds=self._dialect.settings.late_update_seconds)

        async def prepare(worker: Worker) -> None:
            async with patience.of(worker):
                await self._prepare(worker, update)

        return dict(zip(workers, await errors_of(map(prepare, workers)), strict=True))

    async def _prepare(self, worker: Worker, update: WeightUpdate) -> None:
        num_bytes, address = 0, worker.address
        if isinstance(update, PreparedUpdate):
            seconds = self._dialect.settings.update_timeout_seconds
            num_bytes = await update.prepare(address, partial(self._http.ask, address, timeout_seconds=seconds))
        elif isinstance(update, FolderUpdate):
            num_bytes = await asyncio.to_thread(_num_bytes, update.folder)
        self.costs.num_bytes += num_bytes  # behind the awaits: what others add meanwhile would be lost

    async def _update_all(self, update: WeightUpdate, prepared: Mapping[Worker, EngineError | None]) -> None:
        workers, version = self._pool.live, update.policy_version
        if not workers:  # those that came back would be given older weights first
            self._take_over(version, update)
            workers = self._pool.workers
            outcomes = await errors_of(self._readmit(worker, must_reload=True) for worker in workers)
        else:
            patience = _Patience(len(workers), late_seconds=self._dialect.settings.late_update_seconds)
            outcomes = await errors_of(self._update_one(worker, update, prepared, patience) for worker in workers)
        failed = [(worker, each) for worker, each in zip(workers, outcomes, strict=True) if each is not None]
        are_refused = len(failed) == len(workers) and all(isinstance(each, EngineProtocolError) for _, each in failed)
        if self._pool.live and are_refused:
            raise EngineProtocolError(
                f"weights not taken: version {version} is refused, and the servers go on with {self.current_version}: "
                f"{failed[0][1]}"
            )
        self._take_over(version, update)
        for worker, error in failed:
            worker.must_reload = True
            await self._pool.take_out(worker, f"update to version {version} failed: {error}")
            if self._dialect.is_alone:
                self._pool.give_up(worker, str(error))
        if not self._pool.live:
            reason = failed[0][1] if failed else "none was alive"
            raise EngineUnavailableError(f"no worker has version {version}: {reason}")
        self._counters.weight_updates += 1

    def _take_over(self, version: int, update: WeightUpdate | None) -> None:
        self.current_version, self._published, self._may_go_back = version, update, False

    async def _update_one(
        self,
        worker: Worker,
        update: WeightUpdate,
        prepared: Mapping[Worker, EngineError | None],
        patience: _Patience,
    ) -> None:
        if (problem := prepared.get(worker)) is not None:
            raise problem
        try:
            async with patience.of(worker):
                if worker not in prepared:  # it came back meanwhile
                    await self._prepare(worker, update)
                began = asyncio.get_running_loop().time()
                num_bytes = await self._dialect.update(worker, update, is_held=self.is_paused)
        except asyncio.CancelledError:
            worker.must_reload = True  # what it serves now is not known
            worker.suspected.set()
            await self._pool.take_out(worker, "an update of its weights was not waited for")
            raise
        self.costs.num_bytes += num_bytes
        self.costs.pause_seconds = max(self.costs.pause_seconds, asyncio.get_running_loop().time() - began)
        # At once: requests that run there already meet it, also if nobody waits for the other servers.
        self._take_over(update.policy_version, update)

    async def _readmit(self, worker: Worker, *, must_reload: bool) -> None:
        version, current = await self._dialect.version(worker.address), self.current_version
        # A server that was started again calls its first weights 0, which a later update may be called, too.
        is_other = version != current if version else self._published is not None or version not in (None, current)
        if is_other or must_reload:
            told = f"{worker.address}: serves version {version}, {current} is current"
            if self._published is None:
                message = f"{told}, and no weights have been published from here"
                if self._dialect.is_alone:
                    self._pool.give_up(worker, message)
                raise EngineUnavailableError(message)
            _log.warning("%s: it is given them again", told)
            worker.must_reload = True  # until it has come to the end of it
            await self._prepare(worker, self._published)
            await self._dialect.reload(worker, self._published)
        if not self._dialect.aborts_by_closing:
            known = tuple(self._orphans.outstanding)
            await self._dialect.abort(worker.address, None)
            self._orphans.clear(known, at=[worker])
        await self._dialect.release(worker.address)
        if self.is_paused:
            await self._dialect.hold(worker.address)
        await self._pool.readmit(worker)

    async def _hold(self, worker: Worker) -> None:
        if not await self._dialect.hold(worker.address):
            await empty(worker, seconds=self._dialect.settings.control_timeout_seconds)


def _num_bytes(folder: Path) -> int:
    """Return how large the weights in a folder are; 0 where only the servers see it."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
