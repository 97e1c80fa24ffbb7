"""Ways to choose a server: ours and those that others have."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollfeed.routing import Chooser, RoutingSettings, ServerLoadView

_POINTS = 160
"""Of each server on the ring."""


class ReplayPolicy(Protocol):
    """Chooses the server of a request."""

    def choose(
        self, servers: Sequence[ServerLoadView], prompt_ids: NDArray[np.int32], *, session: str, group: str
    ) -> str: ...

    def ended(self, address: str, token_ids: NDArray[np.int32]) -> None:
        """Note that a server has a prompt and its response."""


class _Forgetful:
    """Learns nothing of what servers have."""

    def ended(self, address: str, token_ids: NDArray[np.int32]) -> None:
        pass


class RoundRobin(_Forgetful):
    """Takes one server after the other."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(
        self, servers: Sequence[ServerLoadView], prompt_ids: NDArray[np.int32], *, session: str, group: str
    ) -> str:
        return servers[next(self._numbers) % len(servers)].address


class LeastLoaded(_Forgetful):
    """Takes the server with the fewest requests."""

    def choose(
        self, servers: Sequence[ServerLoadView], prompt_ids: NDArray[np.int32], *, session: str, group: str
    ) -> str:
        return min(servers, key=lambda server: server.num_requests).address


class StickyLeastLoaded(_Forgetful):
    """Takes the server with the fewest requests for a conversation's first turn, and stays there."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}

    def choose(
        self, servers: Sequence[ServerLoadView], prompt_ids: NDArray[np.int32], *, session: str, group: str
    ) -> str:
        least = min(servers, key=lambda server: server.num_requests).address
        return self._homes.setdefault(session, least)


class ConsistentHashing(_Forgetful):
    """Takes the server that a conversation's name falls to on a ring, whatever the load."""

    def __init__(self) -> None:
        self._ring: list[tuple[int, str]] = []

    def choose(
        self, servers: Sequence[ServerLoadView], prompt_ids: NDArray[np.int32], *, session: str, group: str
    ) -> str:
        if not self._ring:
            addresses = [server.address for server in servers]
            self._ring = sorted((_place(f"{each} {point}"), each) for each in addresses for point in range(_POINTS))
        return self._ring[bisect(self._ring, (_place(session), "")) % len(self._ring)][1]


class PrefixAndLoad:
    """Ours: conversations and groups stay where they are as long as there is room; else prefixes against load."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self._chooser = Chooser(settings)

    def choose(
        self, servers: Sequence[ServerLoadView], prompt_ids: NDArray[np.int32], *, session: str, group: str
    ) -> str:
        return self._chooser.choose(servers, prompt_ids, policy_version=0, session=session, group=group).address

    def ended(self, address: str, token_ids: NDArray[np.int32]) -> None:
        self._chooser.ended(address, token_ids, policy_version=0)


POLICIES: dict[str, Callable[[], ReplayPolicy]] = {
    "ours": PrefixAndLoad,
    "consistent_hashing": ConsistentHashing,
    "sticky_least_loaded": StickyLeastLoaded,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def _place(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
