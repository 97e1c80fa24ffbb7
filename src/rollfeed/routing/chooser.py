"""Choice among servers: what each is believed to have computed of a prompt, against what each has to do.

A request goes where it adds the least work, in tokens: those of its prompt that are not cached there, and a share of
what is under way there. Sessions and groups keep their server as long as it is a candidate and not full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollfeed.routing.prefix_tree import PrefixMatch, PrefixTree, text_of

Reason = Literal["session", "group", "prefix", "load"]

_MOST_TREES = 2
"""Of policy versions: while weights are published, some servers have the old ones."""


class HasLoad(Protocol):
    """A server as the choice sees it."""

    @property
    def address(self) -> str:
        """Its name."""

    @property
    def num_requests(self) -> int:
        """Requests that were sent to it from here and have not ended."""

    @property
    def num_waiting(self) -> int:
        """Requests that it says wait there."""

    @property
    def kv_use(self) -> float | None:
        """Used share of its KV cache by its word, 0 to 1; None where it does not say."""


class ServerLoadView(NamedTuple):
    """A server as the choice sees it, as values."""

    address: str
    num_requests: int
    num_tokens: int
    num_waiting: int = 0
    kv_use: float | None = None


class Choice(NamedTuple):
    """The server for a request."""

    address: str
    num_cached: int
    """Tokens of the prompt that it is believed to have."""
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """Bounds and weights of the choice."""

    max_tokens: int = 8_000_000
    """Tokens of all prefixes together that are known of, for each of at most two policy versions."""
    max_server_tokens: int = 500_000
    """Tokens that one server is believed to keep of what it has computed."""
    request_tokens: int = 256
    """Tokens of prefill that cost a new request as much as one more request beside it."""
    spill_requests: int = 8
    """Requests that a server may have above the least busy one, and still keep its sessions and groups."""
    spill_share: float = 0.25
    """The same as a share of what the least busy one has; the larger of the two counts."""
    full_kv_use: float = 0.95
    """Share of the KV cache from which on a server is full."""
    full_tokens: int = 4096
    """Tokens of prefill that cost a new request as much as its wait at a full server, or what that puts back for it: a
    longer prefix is worth it, a shorter one is computed elsewhere.
    """
    most_compared: int = 64
    """Servers whose loads are compared, drawn at random where there are more."""
    max_sessions: int = 100_000
    """Sessions whose server is remembered, and groups, the latest ones."""
    seed: int = 0


class Chooser:
    """Chooses servers and remembers what they have; belongs to one thread, and waits for nothing."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self._settings = settings or RoutingSettings()
        self._trees: dict[int, PrefixTree] = {}
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Server and policy version by key."""
        self._groups: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._random = Random(self._settings.seed)
        self._named: tuple[Sequence[HasLoad], dict[str, HasLoad]] = ((), {})
        """The last servers that came as a tuple, and by their addresses."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all prefixes that are known of."""
        return sum(tree.num_tokens for tree in self._trees.values())

    def choose(
        self,
        servers: Sequence[HasLoad],
        prompt_ids: NDArray[np.int32],
        *,
        policy_version: int,
        session: str | None = None,
        group: str | None = None,
    ) -> Choice:
        """Return the server for a request, and take its prompt ``(P,)`` as being there from now on.

        Args:
            servers: The candidates, at least one. The same tuple again costs less than another one.
            prompt_ids: Everything that will be sent.
            policy_version: Prefixes of other versions are not believed in; a caller whose servers keep their caches
                when weights change always passes the same.
            session: Key of a conversation; keys are compared whole.
            group: Key of requests that have one prompt.

        Raises:
            ValueError: If there is no candidate.
        """
        if not servers:
            raise ValueError("there is no server to choose from")
        text = text_of(prompt_ids)
        tree = self._tree(policy_version)
        match = tree.find(text)
        compared = self._compared(servers)
        by_address = self._by_address(servers)
        address, reason = self._kept(by_address, compared, policy_version, session=session, group=group)
        if address is None:
            address, reason = self._cheapest(by_address, compared, match)
        num_cached = min(match.num_tokens_at(address), max(0, len(prompt_ids) - 1))
        tree.keep(text, match, address)
        _remember(self._sessions, session, (address, policy_version), self._settings.max_sessions)
        _remember(self._groups, group, (address, policy_version), self._settings.max_sessions)
        return Choice(address, num_cached, reason)

    def ended(self, address: str, token_ids: NDArray[np.int32], *, policy_version: int) -> None:
        """Note that a server has a prompt and its response, ``(P + R,)``, computed by these weights."""
        tree = self._tree(policy_version)
        text = text_of(token_ids)
        tree.keep(text, tree.find(text), address)

    def forget_server(self, address: str) -> None:
        """Believe that a server has nothing: it is gone, or was started again."""
        for tree in self._trees.values():
            tree.forget_server(address)
        for table in (self._sessions, self._groups):
            for key in [key for key, (home, _) in table.items() if home == address]:
                del table[key]

    def forget_versions_before(self, policy_version: int) -> None:
        """Forget what older weights have computed."""
        for version in [version for version in self._trees if version < policy_version]:
            self._trees.pop(version).clear()

    def _tree(self, policy_version: int) -> PrefixTree:
        tree = self._trees.get(policy_version)
        if tree is None:
            settings = self._settings
            tree = PrefixTree(max_tokens=settings.max_tokens, max_server_tokens=settings.max_server_tokens)
            if self._trees and len(self._trees) >= _MOST_TREES:
                oldest = min(self._trees)
                if policy_version < oldest:
                    return tree  # nobody will ask for it again
                self._trees.pop(oldest).clear()
            self._trees[policy_version] = tree
        return tree

    def _by_address(self, servers: Sequence[HasLoad]) -> dict[str, HasLoad]:
        if servers is not self._named[0]:
            by_address = {server.address: server for server in servers}
            if not isinstance(servers, tuple):
                return by_address
            self._named = servers, by_address
        return self._named[1]

    def _compared(self, servers: Sequence[HasLoad]) -> Sequence[HasLoad]:
        most = self._settings.most_compared
        return servers if len(servers) <= most else self._random.sample(servers, most)

    def _kept(
        self,
        by_address: dict[str, HasLoad],
        compared: Sequence[HasLoad],
        policy_version: int,
        *,
        session: str | None,
        group: str | None,
    ) -> tuple[str | None, Reason]:
        """Return the server of the session, or of the group, if it may have the request."""
        homes: list[tuple[tuple[str, int] | None, Reason]] = [
            (self._sessions.get(session) if session is not None else None, "session"),
            (self._groups.get(group) if group is not None else None, "group"),
        ]
        for home, reason in homes:
            if home is None or home[1] != policy_version:
                continue
            server = by_address.get(home[0])
            if server is not None and not self._is_full(server, compared):
                return server.address, reason
        return None, "load"

    def _is_full(self, server: HasLoad, compared: Sequence[HasLoad]) -> bool:
        settings = self._settings
        least = min([each.num_requests for each in compared])
        if server.num_requests > least + max(settings.spill_requests, settings.spill_share * least):
            return True
        return not self._has_room(server) and any(map(self._has_room, compared))

    def _has_room(self, server: HasLoad) -> bool:
        return server.kv_use is None or server.kv_use < self._settings.full_kv_use

    def _work(self, server: HasLoad) -> float:
        """Return what is under way at a server, in tokens of prefill."""
        work = self._settings.request_tokens * (server.num_requests + server.num_waiting)
        return work if self._has_room(server) else work + self._settings.full_tokens

    def _cheapest(
        self, by_address: dict[str, HasLoad], compared: Sequence[HasLoad], match: PrefixMatch
    ) -> tuple[str, Reason]:
        works = [self._work(server) for server in compared]
        least = min(works)
        best, best_work = compared[works.index(least)].address, least
        reason: Reason = "load"
        among = None if len(compared) == len(by_address) else {server.address for server in compared}
        for address, num_tokens in match.holders(among):
            if num_tokens <= least - best_work:
                break  # all others have less
            server = by_address.get(address)
            if server is not None and (work := self._work(server) - num_tokens) < best_work:
                best, best_work, reason = address, work, "prefix"
        return best, reason


def _remember(table: OrderedDict[str, tuple[str, int]], key: str | None, home: tuple[str, int], most: int) -> None:
    if key is None:
        return
    table[key] = home
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
