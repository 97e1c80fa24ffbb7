"""Weights of the whole fleet change as one: all workers confirm the new version, or the old one stays.

Nothing is admitted from before the first worker is told until one version stands. What can be undone is: with a folder
known from which the old weights were loaded, workers that have the new ones go back when another one has failed. What
cannot (tensors) goes forward: the new version stands with the workers that have confirmed it. Whoever serves neither
for certain is taken out, with the reason. A worker that does not answer at all is down, and has no say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any, NamedTuple

from rollfeed.base.sglang_wire import RequestError
from rollfeed.base.waiting import until_done
from rollfeed.engine.client.versions import VersionNameError, version_number
from rollfeed.errors import EngineError
from rollfeed.router.fleet import Fleet
from rollfeed.router.members import Member, MemberState
from rollfeed.router.watching import Watcher
from rollfeed.router.worker_kinds import WorkerAsker, WorkerKind

_log = logging.getLogger(__name__)

UPDATING, UNFINISHED, PAUSED = "weights change", "an update in several calls is under way", "generation is paused"
_UNAVAILABLE = 503


class UpdatePhase(StrEnum):
    """Part of an update in several calls that one call is."""

    PREPARE = "prepare"
    """Nothing that a request could see."""
    BEGIN = "begin"
    APPLY = "apply"
    FINISH = "finish"


class UpdateRoute(NamedTuple):
    """A route by which weights change in several calls."""

    kind: WorkerKind
    phase: UpdatePhase


_SGLANG, _VLLM = WorkerKind.SGLANG, WorkerKind.VLLM
UPDATE_ROUTES: Mapping[str, UpdateRoute] = {
    "/init_weights_update_group": UpdateRoute(_SGLANG, UpdatePhase.PREPARE),
    "/destroy_weights_update_group": UpdateRoute(_SGLANG, UpdatePhase.PREPARE),
    "/begin_weight_update": UpdateRoute(_SGLANG, UpdatePhase.BEGIN),
    "/update_weights_from_tensor": UpdateRoute(_SGLANG, UpdatePhase.APPLY),
    "/update_weights_from_distributed": UpdateRoute(_SGLANG, UpdatePhase.APPLY),
    "/update_weights_from_ipc": UpdateRoute(_SGLANG, UpdatePhase.APPLY),
    "/end_weight_update": UpdateRoute(_SGLANG, UpdatePhase.FINISH),
    "/update_weight_version": UpdateRoute(_SGLANG, UpdatePhase.FINISH),
    "/init_weight_transfer_engine": UpdateRoute(_VLLM, UpdatePhase.PREPARE),
    "/start_weight_update": UpdateRoute(_VLLM, UpdatePhase.BEGIN),
    "/update_weights": UpdateRoute(_VLLM, UpdatePhase.APPLY),
    "/collective_rpc": UpdateRoute(_VLLM, UpdatePhase.APPLY),
    "/finish_weight_update": UpdateRoute(_VLLM, UpdatePhase.FINISH),
}


class WeightUpdates:
    """Makes updates, one after another."""

    def __init__(self, fleet: Fleet, asker: WorkerAsker, watcher: Watcher) -> None:
        self._fleet = fleet
        self._settings = fleet.settings
        self._asker = asker
        self._watcher = watcher
        self._lock = asyncio.Lock()
        self._touched: set[Member] = set()
        """Workers that an unfinished update has given something."""
        self._failed: set[Member] = set()
        """Those of them that have not taken all of it."""
        self._is_session = False
        self._timer: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self.held: tuple[Member, ...] = ()
        """Workers that are paused from here."""
        self.keeps_running = False
        """Whether they hold what runs, so that it sees the new weights as whoever paused them wants."""

    async def from_folder(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have all workers load a folder, or none; return the message.

        Args:
            body: As SGLang's ``/update_weights_from_disk`` takes it; without ``weight_version`` it is the next one.

        Raises:
            RequestError: If the old version stays.
        """
        folder = body.get("model_path")
        if not isinstance(folder, str) or not folder:
            raise RequestError("model_path is missing: give the folder with the new *.safetensors")
        async with self._alone():
            name = self._next_name(body.get("weight_version"))
            old = self._fleet.folder_of_version()
            members = self._fleet.ready
            self._check_kinds(members, "", None)
            await self._empty(members, aborts=body.get("abort_all_requests") is True)
            more = {key: value for key, value in body.items() if key not in ("model_path", "weight_version")}
            # Once the first worker is told it goes to its end, whether or not the client is still there.
            loading = self._load_folder(members, folder, name, old=old, more=more)
            return await until_done(asyncio.create_task(loading))

    async def _load_folder(
        self, members: Sequence[Member], folder: str, name: str, *, old: tuple[str, str] | None, more: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        async def load(member: Member, kind: WorkerKind) -> None:
            await self._asker.load_folder(member.address, kind, folder, name, more=more)

        problems = await self.each(members, load)
        told = "; ".join(problems.values())
        voters = [member for member in members if member.state is not MemberState.DOWN]
        failed = [member for member in problems if member in voters]
        for member in problems.keys() - failed:
            self._fleet.distrust(member, problems[member])
        if voters and (not failed or (old is None and len(failed) < len(voters))):
            for member in voters:
                if member in failed:
                    self._fleet.distrust(member, problems[member])
                else:
                    self._watcher.has_loaded(member, folder, name)
            left = f"; left out: {told}" if told else ""
            message = f"Succeeded to update model weights. Weight version updated to {name}{left}."
            return {"success": True, "message": message, "num_paused_requests": 0}
        await self._undo(voters, old)
        stays = f"version {self._fleet.policy_version} stays" if self._fleet.ready else "no worker is left"
        raise RequestError(f"not all workers have loaded {folder}, and {stays}: {told}", status=_UNAVAILABLE)

    async def step(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Pass on a call of an update that takes several; requests are admitted again when it is finished.

        Raises:
            RequestError: If a worker refuses or fails; ones that may have half of the weights are out.
        """
        route = UPDATE_ROUTES[path]
        async with self._lock:
            members = self._healthy()
            self._check_kinds(members, path, route.kind)
            if route.phase is UpdatePhase.PREPARE:
                return await self._passed_on(members, path, body)
            if (name := body.get("weight_version", body.get("new_version"))) is not None:
                self._next_name(name)
            if not self._touched:
                await self._begin(members, path, body)
            self._is_session = self._is_session or route.phase is UpdatePhase.BEGIN
            self._await_end()
            self._touched.update(members)
            return await until_done(asyncio.create_task(self._step(members, path, body)))

    async def _step(self, members: Sequence[Member], path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        is_finish = UPDATE_ROUTES[path].phase is UpdatePhase.FINISH
        try:
            reply = await self._passed_on(members, path, body, is_weights=True)
        except RequestError:
            if is_finish:
                await self._finish()
            raise
        if is_finish or self._is_last(path, body):
            await self._finish()
        return reply

    async def _begin(self, members: Sequence[Member], path: str, body: Mapping[str, Any]) -> None:
        self._fleet.close(UNFINISHED)
        try:
            await self._watcher.until_brought()
            default = path == "/update_weight_version"
            await self._empty(members, aborts=body.get("abort_all_requests", default) is True)
        except BaseException:  # whoever asked has left, for example
            self._fleet.open(UNFINISHED)
            raise

    def _is_last(self, path: str, body: Mapping[str, Any]) -> bool:
        """Whether a call that is in no session ends its update: it names the version, and has the cache flushed."""
        if path == "/collective_rpc":
            return not self._is_session and PAUSED not in (self._fleet.closed_by or "")
        is_named = body.get("weight_version") is not None and body.get("flush_cache") is not False
        return path.startswith("/update_weights_from_") and is_named and not self._is_session

    async def settle(self) -> None:
        """Admit requests again after a pause, or an update that is over, at the version that workers say they have."""
        async with self._lock:
            await self._finish()

    async def close(self) -> None:
        """Wait for no end of an update any more."""
        self._stop_waiting()
        if self._giving_up is not None:
            self._giving_up.cancel()
            await asyncio.gather(self._giving_up, return_exceptions=True)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Admit nothing, and probe nobody, while the block runs."""
        async with self._lock:
            if self._touched:
                raise RequestError("an update in several calls is under way: finish it first", status=409)
            self._fleet.close(UPDATING)
            try:
                await self._watcher.until_brought()
                yield
            finally:
                self._fleet.open(UPDATING)

    def _next_name(self, given: Any) -> str:
        """Return the name of the version to come; versions never go down."""
        current = self._fleet.policy_version
        try:
            version = current + 1 if given is None else version_number(given)
        except VersionNameError as error:
            raise RequestError(str(error)) from None
        if version < current:
            raise RequestError(
                f"weight_version {given!r}: version {current} is served, and versions never go down", status=409
            )
        self._fleet.attempted_version = max(self._fleet.attempted_version, version)
        return str(version if given is None else given)

    async def _empty(self, members: Sequence[Member], *, aborts: bool) -> None:
        """Return when no request of ours is at any of these."""
        if self.keeps_running:
            return
        if aborts:
            await self.abort_all(members)
        seconds = self._settings.drain_seconds if aborts else self._settings.update_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._drained(members)
        except TimeoutError:
            left = [transfer for member in members for transfer in member.transfers]
            if not aborts:
                told = f"{len(left)} requests still run after {seconds:g} s: send abort_all_requests: true"
                raise RequestError(
                    f"{told}, or abort them before; the old version stays", status=_UNAVAILABLE
                ) from None
            for transfer in left:
                if transfer.member is not None:
                    transfer.interrupt(transfer.member)
            await self._drained(members)

    async def _drained(self, members: Sequence[Member]) -> None:
        while any(member.transfers for member in members):
            await self._fleet.until_left()

    async def abort_all(self, members: Sequence[Member]) -> None:
        """Have workers end all they have; one that cannot loses the connections of what it has."""

        async def abort(member: Member, kind: WorkerKind) -> None:
            if not await self._asker.abort(member.address, kind, None):
                for transfer in tuple(member.transfers):
                    transfer.is_aborted = True
                    transfer.interrupt(member)

        await self.each(members, abort)

    async def each(
        self, members: Sequence[Member], act: Callable[[Member, WorkerKind], Awaitable[object]]
    ) -> dict[Member, str]:
        """Act on all members at once; return what went wrong. Those that do not answer at all are down."""

        async def one(member: Member) -> str | None:
            assert member.kind is not None
            try:
                await act(member, member.kind)
                return None
            except EngineError as error:
                problem = str(error)
            _log.warning("%s", problem)
            try:
                await self._asker.weights(member.address, member.kind)
            except EngineError:
                self._fleet.set_state(member, MemberState.DOWN, problem)
            return problem

        told = await asyncio.gather(*(one(member) for member in members))
        return {member: problem for member, problem in zip(members, told, strict=True) if problem is not None}

    async def _undo(self, members: Sequence[Member], old: tuple[str, str] | None) -> None:
        """Have workers serve the old weights again, or take them out."""
        name = old[1] if old is not None else ""

        async def go_back(member: Member, kind: WorkerKind) -> None:
            folder = member.folder if member.folder is not None else old[0] if old is not None else None
            if folder is not None:
                await self._asker.load_folder(member.address, kind, folder, name)
                member.folder = folder
                return
            served = (await self._asker.weights(member.address, kind)).version_name
            told = f"may have weights of a version that does not stand, and says {served!r}"
            self._fleet.distrust(member, told)

        problems = await self.each(members, go_back)
        for member, problem in problems.items():
            self._fleet.distrust(member, f"could not go back: {problem}")

    def _healthy(self) -> Sequence[Member]:
        """Return workers that answer: whole weights make any of them good again."""
        able = (MemberState.READY, MemberState.BEHIND, MemberState.OUT)
        return tuple(member for member in self._fleet if member.state in able and member.kind is not None)

    def _check_kinds(self, members: Sequence[Member], path: str, kind: WorkerKind | None) -> None:
        if not members:
            raise RequestError(f"no worker to update: {self._fleet.told_states()}", status=_UNAVAILABLE)
        others = [member.address for member in members if member.kind is not kind]
        if kind is not None and others:
            raise RequestError(
                f"{path} is of {kind.value} only, and {others[0]} is none: update from a folder by "
                "/update_weights_from_disk, which reaches all"
            )

    async def _passed_on(
        self, members: Sequence[Member], path: str, body: Mapping[str, Any], *, is_weights: bool = False
    ) -> Mapping[str, Any]:
        """Send a call to all at once, each with its place in the group of processes; return the first reply."""
        replies: dict[Member, Mapping[str, Any]] = {}
        offsets: dict[Member, int] = {}
        for member in members:
            offsets[member] = sum(each.num_ranks for each in offsets)

        async def send(member: Member, _kind: WorkerKind) -> None:
            replies[member] = told = await self._asker.command(
                member.address, path, _with_offset(body, offsets[member])
            )
            if told.get("success") is False:
                raise EngineError(f"{member.address}: {told.get('message', 'no success')}")

        problems = await self.each(members, send)
        for member, problem in problems.items():
            self._failed.add(member)
            if is_weights:
                self._fleet.distrust(member, problem)
        if problems:
            raise RequestError(f"{path}: {'; '.join(problems.values())}", status=_UNAVAILABLE)
        return replies[members[0]]

    async def _finish(self) -> None:
        """Ask all workers for their weights; the newest version stands, and whoever has another one is out of it."""
        self._stop_waiting()
        touched, failed = self._touched, self._failed
        self._touched, self._failed, self._is_session = set(), set(), False

        async def ask(member: Member, kind: WorkerKind) -> None:
            told = await self._asker.weights(member.address, kind)
            self._fleet.note_version(member, told.version_name)
            is_other_folder = told.model_path != member.model_path
            member.model_path = told.model_path
            if member in touched:
                member.folder = None
            elif is_other_folder:
                member.folder = told.model_path

        whole = touched - failed
        members = [member for member in self._fleet if member.state is MemberState.READY or member in whole]
        problems = await self.each(members, ask)
        for member in members:
            if member in problems:
                self._fleet.distrust(member, problems[member])
            elif member in whole:
                self._fleet.set_state(member, MemberState.READY)
        self._fleet.open(UNFINISHED)

    def _await_end(self) -> None:
        self._stop_waiting()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.update_seconds, self._begin_giving_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_giving_up(self) -> None:
        self._giving_up = asyncio.create_task(self._give_up())

    async def _give_up(self) -> None:
        async with self._lock:
            told = f"an update was begun, and not finished within {self._settings.update_seconds:g} s"
            self._failed |= self._touched
            for member in self._touched:
                self._fleet.distrust(member, told)
            await self._finish()


def _with_offset(body: Mapping[str, Any], offset: int) -> Mapping[str, Any]:
    """Return a body in which a worker's first rank stands, where the body has ranks; they are the first worker's."""
    if isinstance(first := body.get("rank_offset"), int):
        return {**body, "rank_offset": first + offset}
    info = body.get("init_info")
    if isinstance(info, Mapping) and isinstance(first := info.get("rank_offset"), int):
        return {**body, "init_info": {**info, "rank_offset": first + offset}}
    return body
