"""A pool that is started by its first call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollfeed.errors import WorkerDiedError
from rollfeed.workers.pool import PoolCounts, WorkerPool


class OnDemandPool:
    """A :class:`WorkerPool` whose processes start when they are first needed, and end with the block.

    Args:
        pool: Not entered.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._starting = asyncio.Lock()
        self._started = False
        self._closed = False

    @property
    def counts(self) -> PoolCounts:
        """What has happened to calls."""
        return self._pool.counts

    async def __aenter__(self) -> OnDemandPool:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        self._closed = True
        async with self._starting:
            if self._started:
                await self._pool.close()

    async def start(self) -> None:
        """Start the processes now, unless they run.

        Raises:
            ConfigError: If they cannot be started; the next call tries again.
            WorkerDiedError: If the block has been left.
        """
        async with self._starting:
            if self._closed:
                raise WorkerDiedError("the worker pool is closed")
            if not self._started:
                await self._pool.__aenter__()
                self._started = True

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        if not self._started or self._closed:
            await self.start()
        return await self._pool.call(function_path, args, deadline_seconds=deadline_seconds, cached=cached)
