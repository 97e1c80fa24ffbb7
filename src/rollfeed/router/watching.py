"""Workers are met, probed, and brought to the current weights when they join, return or are behind."""

from __future__ import annotations

import asyncio
import logging
import math

from rollfeed.engine.client.versions import VersionNameError, version_number
from rollfeed.errors import ConfigError, EngineError, EngineProtocolError
from rollfeed.router.fleet import STARTING, Fleet
from rollfeed.router.members import Member, MemberState
from rollfeed.router.worker_kinds import ToldWeights, WorkerAsker, WorkerKind

_log = logging.getLogger(__name__)

_MOST_DOUBLINGS = 6
"""Of the pause before a worker is told again to load weights that it could not load."""


class Watcher:
    """Owns a task for each worker; all end with :meth:`close`."""

    def __init__(self, fleet: Fleet, asker: WorkerAsker) -> None:
        self._fleet = fleet
        self._settings = fleet.settings
        self._asker = asker
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._num_bringing = 0
        self._brought = asyncio.Event()

    async def start(self, addresses: list[str]) -> None:
        """Ask all workers once, side by side, and watch them from then on; nothing is admitted before."""
        self._fleet.close(STARTING)
        joined = [self._known(address) for address in addresses]
        await asyncio.gather(*(self._look(member) for member in joined))
        for member in joined:
            self._watch(member)
        self._fleet.open(STARTING)

    async def add(self, address: str) -> Member:
        """Let a worker join, ask it once, and watch it; one that is there already is asked again."""
        member = self._known(address)
        member.next_load = 0.0
        if member not in self._tasks:
            await self._look(member)
            self._watch(member)
        else:
            member.woken.set()
        return member

    def remove(self, member: Member) -> None:
        """Know a worker no more; what it has may end there."""
        self._fleet.members.pop(member.address, None)
        self._fleet.chooser.forget_server(member.address)
        self._fleet.changed()
        if (task := self._tasks.pop(member, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Watch nobody any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known(self, address: str) -> Member:
        return self._fleet.members.setdefault(address, Member(address))

    def _watch(self, member: Member) -> None:
        is_there = self._fleet.members.get(member.address) is member
        if is_there and member not in self._tasks:
            self._tasks[member] = asyncio.create_task(self._keep_looking(member), name=f"watch {member.address}")

    async def _keep_looking(self, member: Member) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.probe_seconds):
                    await member.woken.wait()
            except TimeoutError:
                pass
            member.woken.clear()
            await self._look(member)

    async def _look(self, member: Member) -> None:
        """Ask a worker how it is, and say whether it may have requests."""
        if self._fleet.is_changing:
            return
        try:
            await self._probe(member)
        except EngineProtocolError as error:
            # No worker, another kind than before, or weights of a name that is no version: until then it is waited for.
            member.is_suspect = True
            if member.state is not MemberState.OUT:
                self._fleet.set_state(member, MemberState.JOINING, str(error))
        except (EngineError, ConfigError) as error:
            await self._failed(member, str(error))

    async def _failed(self, member: Member, problem: str) -> None:
        kind = member.kind
        if kind is None:
            member.reason = problem
            return
        seconds = self._settings.probe_timeout_seconds
        if member.state is MemberState.READY and await self._asker.is_paused(
            member.address, kind, timeout_seconds=seconds
        ):
            return
        member.num_failed_probes += 1
        if member.num_failed_probes >= self._settings.probes_until_down:
            self._fleet.set_state(member, MemberState.DOWN, problem)

    async def _probe(self, member: Member) -> None:
        seconds, address = self._settings.probe_timeout_seconds, member.address
        kind, was_suspect = member.kind, member.is_suspect
        if kind is None or member.state is MemberState.DOWN or was_suspect:
            kind, told = await self._meet(member)
        else:
            await self._asker.health(address, timeout_seconds=seconds)
            told = await self._asker.weights(address, kind)
        load = await self._asker.load(address, kind)
        member.num_running, member.num_waiting, member.kv_use = load
        if self._fleet.is_changing:
            return  # what was told may be older than what is being done
        if member.is_suspect and not was_suspect:
            return  # lost meanwhile: what answers from now on may be another one, and the next probe meets it
        self._settle(member, told)
        waited = asyncio.get_running_loop().time() - member.behind_since
        is_late = member.state is MemberState.BEHIND and waited >= self._settings.late_seconds
        if is_late or member.state is MemberState.OUT:
            await self._bring(member)

    async def _meet(self, member: Member) -> tuple[WorkerKind, ToldWeights]:
        """Find out what answers: another kind of server than before has neither its weights nor its routes."""
        found = await self._asker.meet(member.address, timeout_seconds=self._settings.probe_timeout_seconds)
        told = await self._asker.weights(member.address, found.kind)
        if found.kind is not member.kind:
            self._fleet.chooser.forget_server(member.address)
            member.become(found)
            # A version that was never changed is what the server was started with.
            member.model_path = told.model_path
            member.folder = told.model_path if told.version_name in (None, "default") else None
            self._fleet.changed()
        return found.kind, told

    def _settle(self, member: Member, told: ToldWeights) -> None:
        """Say by what a healthy worker tells of its weights whether it may have requests."""
        was_lost = member.state is MemberState.DOWN or member.is_suspect
        if was_lost and member.lacks:
            member.lacks.clear()  # it may be another one by now
            self._fleet.changed()
        member.num_failed_probes, member.is_suspect = 0, False
        if member.distrusted_version >= 0 and not _is_newer(told.version_name, member.distrusted_version):
            if member.state is not MemberState.OUT:
                self._fleet.set_state(member, MemberState.OUT, "it was lost in an update of its weights")
            return  # its word does not count
        member.distrusted_version = -1
        if told.version_name is None and member.version_name is None:
            # It keeps no name: once lost it may have been started again, with its first weights.
            if was_lost or member.state is MemberState.JOINING:
                member.policy_version = 0
        else:
            self._note_weights(member, told)
        if member.policy_version == self._fleet.policy_version:
            self._fleet.set_state(member, MemberState.READY)
        else:
            # Whoever publishes to workers directly may just not have come to this one.
            is_waited_for = member.state is MemberState.READY and member.policy_version == member.newest_version
            if member.state is not MemberState.BEHIND:
                member.behind_since = asyncio.get_running_loop().time() if is_waited_for else -math.inf
            reason = f"serves version {member.policy_version}, and the fleet {self._fleet.policy_version}"
            self._fleet.set_state(member, MemberState.BEHIND, reason)

    def _note_weights(self, member: Member, told: ToldWeights) -> None:
        is_same = told.version_name == member.version_name
        if not is_same and member.version_name is not None:
            # Loaded by somebody else: from a folder if it names another one, from tensors otherwise.
            is_folder = told.model_path != member.model_path or told.version_name == "default"
            member.folder = told.model_path if is_folder else None
        member.model_path = told.model_path
        self._fleet.note_version(member, told.version_name)

    async def _bring(self, member: Member) -> None:
        """Have a worker without requests load the current weights, where it is known from which folder."""
        source = self._fleet.folder_of_version()
        if source is None:
            if member.state is MemberState.BEHIND:
                told = f"serves version {member.policy_version}, and the fleet {self._fleet.policy_version}"
                reason = f"{told}, whose folder is not known here: update it, or publish the next version"
                self._fleet.set_state(member, MemberState.BEHIND, reason)
            return
        loop = asyncio.get_running_loop()
        if member.transfers or loop.time() < member.next_load or member.kind is None:
            return
        folder, name = source
        self._num_bringing += 1
        try:
            await self._asker.load_folder(member.address, member.kind, folder, name)
            self.has_loaded(member, folder, name)
        except EngineError as error:
            doublings = min(member.num_failed_loads, _MOST_DOUBLINGS)
            member.next_load = loop.time() + self._settings.probe_seconds * 2**doublings
            member.num_failed_loads += 1
            self._fleet.distrust(member, f"cannot load version {name} from {folder}: {error}")
        finally:
            self._num_bringing -= 1
            self._brought.set()

    async def until_brought(self) -> None:
        """Return when no worker is being brought to the current weights."""
        while self._num_bringing:
            self._brought.clear()
            await self._brought.wait()

    def has_loaded(self, member: Member, folder: str | None, name: str) -> None:
        """Note that a worker has confirmed weights, which it was told to load from a folder or was sent."""
        member.num_failed_loads = 0
        member.folder = folder
        if folder is not None:
            member.model_path = folder
        if member.version_name is None:
            member.policy_version = member.newest_version = version_number(name)
            self._fleet.raise_version(member.policy_version)
        else:
            self._fleet.note_version(member, name)
        self._fleet.set_state(member, MemberState.READY)


def _is_newer(name: str | None, version: int) -> bool:
    try:
        return name is not None and version_number(name) > version
    except VersionNameError:
        return False
