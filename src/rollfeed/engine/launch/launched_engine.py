"""Servers as one engine that starts them, waits for those that are started again, and ends them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from rollfeed.engine.client import Dialect, ServerEngine
from rollfeed.engine.client.dialect import Context
from rollfeed.engine.client.workers import errors_of
from rollfeed.engine.http import Http
from rollfeed.engine.launch.launching import ServerLauncher
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import WeightUpdate

_log = logging.getLogger(__name__)


class LaunchedEngine(ServerEngine):
    """Is :class:`ServerEngine` for the servers of a launcher, at whose addresses the dialect's settings are."""

    def __init__(self, launcher: ServerLauncher, dialect: Dialect, **others: Any) -> None:
        super().__init__(dialect, **others)
        self.launcher = launcher

    async def __aenter__(self) -> LaunchedEngine:
        dialect, seconds = self._dialect, self._settings.control_timeout_seconds
        async with Http(api_key=dialect.api_key, max_connections=1, control_timeout_seconds=seconds) as http:
            dialect.open(Context(http, self._tokenizer, self.context_length))
            await self.launcher.start(partial(dialect.health, timeout_seconds=seconds))
        try:
            await super().__aenter__()
        except BaseException:
            await self.launcher.close()
            raise
        self.launcher.watch(self._server_ended)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await super().__aexit__(*exc_info)
        finally:
            await self.launcher.close()

    async def apply(self, update: WeightUpdate) -> None:
        """Have every server load new weights; where all have ended, wait until one is started again and has them."""
        try:
            await super().apply(update)
        except EngineUnavailableError:
            if self._pool.live:
                raise
            while not self._pool.live:
                for worker in self._pool.workers:
                    worker.problem = None  # requests wait, too
                if not await self.launcher.revive():
                    raise
                await errors_of(self.weights.readmit(worker) for worker in self._pool.workers)
            self.counters.weight_updates += 1

    async def sleep(self) -> None:
        """Have servers give up their memory until :meth:`wake_up`; requests wait. One that does not answer is out.

        Those that are just being started again are waited for, as they would take memory in the middle.

        Raises:
            EngineProtocolError: If one refuses.
        """
        self.weights.rest()
        await self.launcher.hold()
        workers = [each for each in self._pool.workers if each.is_live or self.launcher.is_back(each.address)]
        errors = await errors_of(self._dialect.sleep(worker) for worker in workers)
        for worker, error in zip(workers, errors, strict=True):
            if isinstance(error, EngineProtocolError) and worker.is_live:
                raise error
            if error is not None:
                await self._pool.take_out(worker, f"it does not give up its memory: {error}")

    async def wake_up(self) -> None:
        """Have servers take their memory back; one that does not is taken out."""
        workers = self._pool.workers
        errors = await errors_of(self._dialect.wake_up(worker.address) for worker in workers)
        for worker, error in zip(workers, errors, strict=True):
            if error is not None:
                await self._pool.take_out(worker, f"it does not take its memory back: {error}")
        self.launcher.go_on()
        self.weights.look_after()

    async def _server_ended(self, address: str, why: str, is_lost: bool) -> None:
        for worker in self._pool.workers:
            if worker.address == address:
                if not worker.is_live:
                    _log.warning("%s", why)
                await self._pool.take_out(worker, why)
                if is_lost:
                    self._pool.give_up(worker, why)
