"""All workers, who of them may have requests, and who gets the next one.

Invariant: a request is counted at one worker from the moment it is admitted until its try there has ended, however it
ends; nothing is admitted while weights change.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rollfeed.base.sglang_wire import RequestError, base_id
from rollfeed.engine.client.versions import VersionNameError, version_number
from rollfeed.errors import EngineProtocolError
from rollfeed.router.members import Member, MemberState, Transfer
from rollfeed.router.router_settings import RouterSettings, RoutingPolicy
from rollfeed.router.worker_kinds import BOTH, ROUTES
from rollfeed.routing import Chooser

_log = logging.getLogger(__name__)

STARTING = "the first workers are being asked"
"""What keeps requests waiting at the start."""
FULL_STATUS, NONE_STATUS = 429, 503


class TransferAbortedError(Exception):
    """A request was aborted before a worker had it."""


class Fleet:
    """Admits requests to workers of one policy version. Belongs to one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.members: dict[str, Member] = {}
        """By address."""
        self.policy_version = 0
        """The newest that a worker has served; it never goes down."""
        self.attempted_version = 0
        """The newest that an update from here was to bring."""
        self.transfers: set[Transfer] = set()
        """Requests here, waiting ones included."""
        self.owners: dict[str, set[Transfer]] = {}
        """By the ids that requests came with."""
        self._bases: dict[str, set[Transfer]] = {}
        """By the id of which theirs are those of several samples."""
        self.counters: Counter[str] = Counter()
        self.chooser = Chooser()
        self._closings: set[str] = set()
        self._waiting: dict[str, deque[Transfer]] = {}
        self._able: dict[str, Sequence[Member]] = {}
        """Members that may have requests, by path, until something changes."""
        self._turn = itertools.count()
        self._left = asyncio.Event()

    @property
    def ready(self) -> Sequence[Member]:
        """Workers with the current weights."""
        return tuple(each for each in self.members.values() if each.is_at(self.policy_version))

    @property
    def closed_by(self) -> str | None:
        """Reasons why all requests wait, in words; None where there is none."""
        return " and ".join(sorted(self._closings)) or None

    @property
    def is_changing(self) -> bool:
        """Whether workers are paused, or given weights, from here: nobody asks them anything then."""
        return bool(self._closings - {STARTING})

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return sum(map(len, self._waiting.values()))

    def close(self, reason: str) -> None:
        """Admit nothing until :meth:`open` with the same reason."""
        self._closings.add(reason)

    def open(self, *reasons: str) -> None:
        """Admit requests again, if nothing else keeps them."""
        self._closings.difference_update(reasons)
        self.changed()

    def changed(self) -> None:
        """Look again who may have requests, and wake those that wait for one."""
        self._able.clear()
        if not self._closings:
            for path, waiting in self._waiting.items():
                for _ in range(len(waiting)):
                    self._wake_next(path)

    def set_state(self, member: Member, state: MemberState, reason: str = "") -> None:
        """Say whether a worker may have requests."""
        if (member.state, member.reason) == (state, reason):
            return
        if member.state is not state:
            _log.info("%s: %s%s", member.address, state.value, f": {reason}" if reason else "")
        if state in (MemberState.DOWN, MemberState.OUT):
            self.chooser.forget_server(member.address)
        if state is MemberState.READY:
            member.distrusted_version = -1
        member.set_state(state, reason)
        self.changed()

    def distrust(self, member: Member, problem: str) -> None:
        """Keep out a worker that may have half of new weights, until it has loaded all, or names newer ones."""
        member.distrusted_version = max(self.policy_version, self.attempted_version)
        if member.state is not MemberState.DOWN:
            self.set_state(member, MemberState.OUT, problem)

    def note_version(self, member: Member, name: str | None) -> bool:
        """Take a worker's word for its weights; return whether the fleet's version has risen by it.

        Raises:
            EngineProtocolError: If the name is no policy version.
        """
        if name == member.version_name:
            return False
        try:
            version = 0 if name is None else version_number(name)
        except VersionNameError as error:
            raise EngineProtocolError(f"{member.address}: {error}") from None
        member.version_name, member.policy_version = name, version
        member.newest_version = max(member.newest_version, version)
        self._able.clear()
        return self.raise_version(version)

    def raise_version(self, version: int) -> bool:
        """Serve a version from now on, if it is newer; return whether it is."""
        if version <= self.policy_version:
            return False
        _log.info("policy version %d", version)
        self.policy_version = version
        self.chooser.forget_versions_before(version)
        self._able.clear()
        for each in self.members.values():
            each.woken.set()
        return True

    def folder_of_version(self) -> tuple[str, str] | None:
        """Return a folder with the current weights and their name, where a worker is known to have loaded them so."""
        for member in self.ready:
            if member.folder is not None:
                return member.folder, member.version_name or str(member.policy_version)
        return None

    async def admit(self, transfer: Transfer) -> Member:
        """Return the worker for a request, which is counted there until :meth:`leave`; waits while there is none.

        Raises:
            TransferAbortedError: If it is aborted before.
            RequestError: If no worker has its route, too many wait, or none is there in time.
        """
        self.transfers.add(transfer)
        for table, key in self._keys(transfer):
            table.setdefault(key, set()).add(transfer)
        deadline = asyncio.get_running_loop().time() + self.settings.wait_seconds
        while True:
            if transfer.is_aborted:
                raise TransferAbortedError
            if not self._closings and (able := self._candidates(transfer)):
                return self._enter(transfer, able)
            self._refuse_unknown(transfer.path)
            await self._wait(transfer, deadline)

    def leave(self, transfer: Transfer) -> None:
        """Count a request as being at its worker no more."""
        member, transfer.member = transfer.member, None
        if member is None:
            return
        member.transfers.discard(transfer)
        member.num_tokens -= len(transfer.fields.prompt_ids)
        self._left.set()
        if not self._closings:
            for path in self._waiting:
                self._wake_next(path)

    async def until_left(self) -> None:
        """Return when a request has left its worker."""
        self._left.clear()
        await self._left.wait()

    def end(self, transfer: Transfer) -> None:
        """Know a request no more."""
        self.leave(transfer)
        self.transfers.discard(transfer)
        for table, key in self._keys(transfer):
            owners = table.get(key)
            if owners is not None:
                owners.discard(transfer)
                if not owners:
                    del table[key]

    def owned(self, rid: str) -> Sequence[Transfer]:
        """Return the requests with an id; else that of which it is a sample's, or all that are samples of it."""
        found = self.owners.get(rid) or self.owners.get(base_id(rid) or "") or self._bases.get(rid) or ()
        return tuple(found)

    def _keys(self, transfer: Transfer) -> Iterator[tuple[dict[str, set[Transfer]], str]]:
        for rid in transfer.fields.rids:
            yield self.owners, rid
            if (base := base_id(rid)) is not None:
                yield self._bases, base

    def able(self, path: str) -> Sequence[Member]:
        """Return the workers that may have requests and have a route."""
        found = self._able.get(path)
        if found is None:
            kinds = ROUTES.get(path, BOTH)
            found = tuple(each for each in self.ready if each.kind in kinds and path not in each.lacks)
            self._able[path] = found
        return found

    def told_states(self) -> str:
        """Say of each worker without requests why it has none."""
        told = [f"{each.address} is {each.state.value}: {each.reason}" for each in self.members.values() if each.reason]
        return "; ".join(told[:5]) or "there is no worker"

    def _candidates(self, transfer: Transfer) -> Sequence[Member]:
        most = self.settings.max_in_flight
        able = self.able(transfer.path)
        free = [each for each in able if len(each.transfers) < most and not each.is_suspect]
        if len(free) == len(able) and not transfer.avoided:
            return able  # the same tuple again costs the chooser less
        free = free or [each for each in able if len(each.transfers) < most]
        if transfer.avoided:
            return [each for each in free if each not in transfer.avoided] or free
        return free

    def _enter(self, transfer: Transfer, able: Sequence[Member]) -> Member:
        member = self._choose(transfer, able)
        member.transfers.add(transfer)
        member.num_tokens += len(transfer.fields.prompt_ids)
        transfer.member, transfer.policy_version = member, self.policy_version
        return member

    def _choose(self, transfer: Transfer, able: Sequence[Member]) -> Member:
        policy = self.settings.policy
        if policy is RoutingPolicy.PREFIX:
            fields = transfer.fields
            choice = self.chooser.choose(
                able,
                fields.prompt_ids,
                policy_version=self.policy_version,
                session=fields.session,
                group=fields.group,
            )
            self.counters[f"chosen_by_{choice.reason}"] += 1
            self.counters["prompt_tokens"] += len(fields.prompt_ids)
            self.counters["cached_tokens"] += choice.num_cached
            return self.members[choice.address]
        turn = next(self._turn) % len(able)
        if policy is RoutingPolicy.ROUND_ROBIN:
            return able[turn]
        # From the next one on, so that equally loaded workers take turns.
        return min([*able[turn:], *able[:turn]], key=lambda each: each.num_requests)

    def _refuse_unknown(self, path: str) -> None:
        """Raise RequestError where workers have answered, and none has the route, nor one that may still join soon."""
        kinds, now = ROUTES.get(path, BOTH), asyncio.get_running_loop().time()
        met = [each for each in self.members.values() if each.kind is not None]
        unmet = [each for each in self.members.values() if each.kind is None]
        if not met or any(each.kind in kinds and path not in each.lacks for each in met):
            return
        told = f"no worker has {path}: they are of kind {', '.join(sorted({str(each.kind) for each in met}))}"
        if not unmet:
            raise RequestError(told, status=404)
        if all(now - each.joined_at >= self.settings.wait_seconds for each in unmet):
            raise RequestError(f"{told}; {unmet[0].address} has never answered", status=NONE_STATUS)

    async def _wait(self, transfer: Transfer, deadline: float) -> None:
        if self.num_waiting >= self.settings.max_waiting:
            raise RequestError(f"{self.num_waiting} requests wait for a worker already", status=FULL_STATUS)
        waiting = self._waiting.setdefault(transfer.path, deque())
        # One that was woken in vain, as another came before it, is the next one still.
        (waiting.append if transfer.waiter is None else waiting.appendleft)(transfer)
        waiter = transfer.waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake_next(transfer.path)
            raise
        except TimeoutError:
            is_full = self._closings or self.able(transfer.path)
            told = self.closed_by or ("all workers are full" if is_full else self.told_states())
            raise RequestError(
                f"no worker within {self.settings.wait_seconds:g} s: {told}",
                status=FULL_STATUS if is_full and not self._closings else NONE_STATUS,
            ) from None
        finally:
            if not waiter.done() or waiter.cancelled() or transfer.is_aborted:
                with suppress(ValueError):
                    waiting.remove(transfer)

    def _wake_next(self, path: str) -> None:
        waiting = self._waiting[path]
        while waiting:
            waiter = waiting.popleft().waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
                return

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self.members.values()))
