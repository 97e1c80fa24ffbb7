"""Calls of graders and environments, spread over hosts whose pools of processes make them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollfeed.cluster.hosting import Host, HostDiedError
from rollfeed.protocols import Workers

_TRIES = 5
_PAUSE_SECONDS = 1.0


class RemoteWorkers(Workers):
    """Calls functions on the least busy host; what a host that dies was asked is asked again of another.

    Functions are such as may be called twice: their results depend on their arguments only.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)
        self._num_calls = dict.fromkeys(range(len(self._hosts)), 0)

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        died: dict[int, HostDiedError] = {}
        for attempt in range(_TRIES):
            chosen = min(self._num_calls, key=lambda number: (number in died, self._num_calls[number], number))
            self._num_calls[chosen] += 1
            try:
                return await self._hosts[chosen].call("call", function_path, list(args), deadline_seconds, cached)
            except HostDiedError as error:
                died[chosen] = error
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
            finally:
                self._num_calls[chosen] -= 1
        raise next(reversed(died.values()))
