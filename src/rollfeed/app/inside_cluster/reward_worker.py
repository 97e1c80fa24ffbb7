"""A reward worker: processes that make the calls of graders and environments, on a node of their own."""

from __future__ import annotations

from typing import Any

from rollfeed.app.cluster.orders import pack
from rollfeed.app.inside_cluster.kept_output import KeptOutput
from rollfeed.app.rewards import RewardServices
from rollfeed.config import RewardSettings


class RewardWorker:
    """Makes calls in the processes that ``[reward.workers]`` describes."""

    def __init__(self, settings: RewardSettings) -> None:
        self._workers = RewardServices(settings, rm_types=[]).workers
        self._output = KeptOutput()
        self._workers.output = self._output.printed

    async def call(self, function_path: str, args: list[Any], deadline_seconds: float, cached: bool) -> Any:
        """Call a function, as :meth:`rollfeed.protocols.Workers.call`."""
        return await self._workers.call(function_path, args, deadline_seconds=deadline_seconds, cached=cached)

    async def output(self) -> bytes:
        """Return what functions have printed since the last call."""
        return pack(self._output.take())

    async def close(self) -> bytes:
        """End the processes, and return what functions have printed since the last call."""
        await self._workers.__aexit__()
        self._output.end()
        return pack(self._output.take())
