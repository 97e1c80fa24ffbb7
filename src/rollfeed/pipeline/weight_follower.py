"""Brings the weights of a trainer outside into the engine, and holds generation back when they do not come."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rollfeed.base.waiting import telling_of_waiting
from rollfeed.errors import EngineError, EngineProtocolError
from rollfeed.pipeline.groups.step_clock import Activity, StepClock
from rollfeed.protocols import CheckpointSource, WeightPublisher
from rollfeed.types import FolderUpdate

_log = logging.getLogger(__name__)

_TOLD_AFTER_SECONDS = 10.0


class WeightFollower:
    """Publishes the newest version that a source has.

    A trainer that has trained ``n`` batches publishes version ``n``; batch ``step`` is made when version
    ``step - max_lag`` is there, so that batches do not pile up before a trainer that is slow or gone.
    """

    def __init__(
        self,
        source: CheckpointSource,
        publisher: WeightPublisher,
        *,
        max_lag: int,
        poll_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._source = source
        self._publisher = publisher
        self._max_lag = max_lag
        self._poll_seconds = poll_seconds
        self._timeout_seconds = timeout_seconds
        self._publishing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.clock = StepClock()
        """Told of publishing; its manager has the same one."""
        self._unproved: EngineError | None = None
        """Why a version that has been loaded may not be used."""

    async def before_step(self, step: int) -> None:
        """Return when the engine has the newest version, and that is new enough for a step.

        Raises:
            RunFailedError: If the version does not come in time.
            EngineError: If the engine does not take it, or has other weights afterwards.
        """
        needed = step - self._max_lag
        is_taken = False
        while not is_taken:
            if needed > self._publisher.policy_version:
                async with self._telling_of_waiting(step, needed):
                    await self._source.wait_for(needed, timeout_seconds=self._timeout_seconds)
            try:
                is_taken = await self._publish_newest()
            except EngineError:
                # A trainer may have removed the folder while it was being loaded, for a newer one.
                is_taken = await self._publish_newest()
        if self._unproved is not None:
            raise self._unproved

    def start(self) -> None:
        """Publish what comes while batches are being made, too; for generation that does not stop."""
        self._task = asyncio.create_task(self._follow(), name="follow weights")

    async def close(self) -> None:
        """End what :meth:`start` began."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _telling_of_waiting(self, step: int, version: int) -> AbstractAsyncContextManager[None]:
        def tell(waited: str) -> None:
            _log.info("step %d waits for weights of version %d, %s: is the trainer running?", step, version, waited)

        seconds, limit = self._timeout_seconds, "weights.timeout_seconds"
        return telling_of_waiting(tell, most_seconds=_TOLD_AFTER_SECONDS, limit_seconds=seconds, limit=limit)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                while not await self._publish_newest():
                    pass
            except EngineError as error:
                # The next step needs a version, and says so if it does not come.
                _log.warning("new weights could not be loaded: %s", error)

    async def _publish_newest(self) -> bool:
        """Return whether the newest version is in the engine; one that it refuses is passed over, first for a while."""
        newest = await asyncio.to_thread(self._source.newest)
        return newest is None or await self._publish(*newest)

    async def _publish(self, version: int, folder: Path) -> bool:
        async with self._publishing:
            if version > self._publisher.policy_version:
                is_proving = self._publisher.is_proving
                probe = await asyncio.to_thread(self._source.probe, folder) if is_proving else None
                with self.clock.doing(Activity.PUBLISH):
                    try:
                        await self._publisher.publish(FolderUpdate(folder, policy_version=version))
                    except EngineProtocolError as error:
                        told = str(error).removeprefix(f"{folder}: ")
                        self._source.refuse(folder, f"the engine does not take version {version}: {told}")
                        return False
                    # It has been loaded: trying again would find nothing to do.
                    self._unproved = None
                    try:
                        await self._publisher.prove(probe)
                    except EngineError as error:
                        self._unproved = error
                        raise
                _log.info("weights of version %d are in the engine", version)
            return True
