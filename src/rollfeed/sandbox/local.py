"""Sandboxes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecResult, Isolation, IsolationLevel
from rollfeed.sandbox.cgroups import Cgroup, Cgroups, find_cgroups
from rollfeed.sandbox.files import delete_folder, make_held_folder, read_within, write_within
from rollfeed.sandbox.own_mounts import OwnMounts, find_own_mounts
from rollfeed.sandbox.running import run, settled, uncancelled
from rollfeed.sandbox.wrapping import pick_user, wrap

_SWEEPS = 100


class LocalSandbox:
    """A folder of this machine, and programs in it at one isolation level.

    Args:
        folder: The sandbox's own, empty; nothing else is in its parent but what isolation needs.
        level: How programs are kept from the machine.
        user: Owner of the folder and of the programs, or None for who we are.
        turns: Held while a program runs.
        cgroups: Make the control group of each program, or None where there are none.
        mounts: Have a file system on the folder already, or None: then it is watched.
        places: As :func:`rollfeed.sandbox.wrapping.wrap` takes them.
        has_network: Whether programs have the machine's.
    """

    def __init__(
        self,
        *,
        folder: Path,
        level: IsolationLevel,
        user: int | None,
        turns: ProgramTurns,
        cgroups: Cgroups | None,
        mounts: OwnMounts | None,
        places: Sequence[str],
        has_network: bool,
    ) -> None:
        self._folder = folder
        self._seen = folder if mounts is None else mounts.seen(folder)
        self._level = level
        self._user = user
        self._turns = turns
        self._cgroups = cgroups
        self._mounts = mounts
        self._places = places
        self._has_network = has_network
        self._marker = os.urandom(12).hex()

    async def exec(self, command: Sequence[str], *, stdin: bytes = b"", limits: ExecLimits) -> ExecResult:
        if not command:
            raise SandboxError("the command is empty")
        bounded = nullcontext() if self._mounts is None else self._mounts.bounded(self._folder, limits)
        async with self._turns.take() as core, bounded as temporary:
            group, cancelled = await settled(asyncio.to_thread(self._make_group, limits))
            try:
                if cancelled:
                    raise asyncio.CancelledError
                return await self._run(command, stdin=stdin, limits=limits, group=group, core=core, temporary=temporary)
            finally:
                if group is not None:
                    await uncancelled(asyncio.to_thread(group.remove))

    async def _run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes,
        limits: ExecLimits,
        group: Cgroup | None,
        core: int | None,
        temporary: Path | None,
    ) -> ExecResult:
        own = self._level is not IsolationLevel.LIMITS
        entrances = [] if group is None else group.open_entrances()

        def make_command(status: int) -> list[str]:
            return wrap(
                self._level,
                command,
                folder=self._folder,
                user=self._user,
                marker=self._marker,
                limits=limits,
                status=status,
                entrances=entrances,
                core=core,
                mounts=self._mounts,
                temporary=temporary,
                places=self._places,
                has_network=self._has_network,
            )

        return await run(
            make_command,
            entrances=entrances,
            stdin=stdin,
            limits=limits,
            folder=self._seen,
            has_init=own,
            group=group,
            sweep=(lambda: None) if own else self._kill_escaped,
        )

    def _make_group(self, limits: ExecLimits) -> Cgroup | None:
        try:
            return None if self._cgroups is None else self._cgroups.make(limits.memory_bytes)
        except OSError as error:
            raise SandboxError(f"a program's control group cannot be made: {error}") from error

    async def read(self, path: str, *, max_bytes: int = 64 * 1024**2) -> bytes:
        return await asyncio.to_thread(read_within, self._seen, path, max_bytes=max_bytes)

    async def write(self, path: str, content: bytes) -> None:
        await asyncio.to_thread(write_within, self._seen, path, content, owner=self._user)

    def _kill_escaped(self) -> None:
        """Kill processes that left the program's group; without a process namespace they must be looked for."""
        for _ in range(_SWEEPS):
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and self._is_ours(name)]
            if not pids:
                return
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _is_ours(self, pid: str) -> bool:
        try:
            if self._user is not None:
                return os.stat(f"/proc/{pid}").st_uid == self._user and not _has_ended(pid)
            return f"ROLLFEED_SANDBOX={self._marker}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


class ProgramTurns:
    """Lets so many programs run at once, each on a core of its own where ``pins``, as far as there are as many."""

    def __init__(self, count: int, *, pins: bool) -> None:
        self._free = asyncio.Semaphore(count)
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores[number % len(cores)] for number in range(count)] if pins else []

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int | None]:
        """Wait for a turn; return its core, if it has one."""
        async with self._free:
            core = self._cores.pop(0) if self._cores else None
            try:
                yield core
            finally:
                if core is not None:
                    self._cores.append(core)


class LocalSandboxes:
    """Makes sandboxes on this machine; :func:`rollfeed.sandbox.start_sandboxes` finds out what it can do.

    At most ``max_running`` programs of all sandboxes run at once; more wait, and their time limits with them.
    ``places`` are absolute paths that programs write to instead of ``/box``, none within another: the first is their
    home, and the sandbox's folder has them below it. With ``has_network`` they have the machine's. ``cgroups`` are
    found by default; without them a program is kept to one core, unless it has places.
    """

    def __init__(
        self,
        *,
        isolation: Isolation,
        max_running: int,
        scratch: Path | None = None,
        places: Sequence[str] = (),
        has_network: bool = False,
        cgroups: Cgroups | str | None = None,
    ) -> None:
        self.isolation = replace(isolation, network_cut=isolation.network_cut and not has_network)
        self._places = places
        self._has_network = has_network
        self._scratch = scratch
        found = find_cgroups() if cgroups is None else cgroups
        self._cgroups = found if isinstance(found, Cgroups) else None
        is_hidden = isolation.level in (IsolationLevel.BUBBLEWRAP, IsolationLevel.NAMESPACES)
        mounts = find_own_mounts() if is_hidden and not places else "places are folders of the machine"
        self._mounts = mounts if isinstance(mounts, OwnMounts) else None
        self.lacking = [
            f"{what} ({reason})"
            for what, reason in (
                ("a control group, so that memory is bounded by looking at it", found),
                ("file systems of their own, so that files are bounded by looking at them", mounts),
            )
            if isinstance(reason, str)
        ]
        """What programs are not given here, with the reasons."""
        self._turns = ProgramTurns(max_running, pins=self._cgroups is None and not places)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LocalSandbox]:
        """Make an empty sandbox; its files are deleted on leaving. Raises SandboxError if its folder cannot be made."""
        user = pick_user()
        folder = _make_folder(self._scratch, user, self._places)
        try:
            await self._mount(folder, user)
            yield LocalSandbox(
                folder=folder,
                level=self.isolation.level,
                user=user,
                turns=self._turns,
                cgroups=self._cgroups,
                mounts=self._mounts,
                places=self._places,
                has_network=self._has_network,
            )
        finally:
            if self._mounts is not None:
                with suppress(OSError):  # it could not be mounted
                    await uncancelled(self._mounts.unmount(folder))
            await asyncio.to_thread(delete_folder, folder.parent)

    async def _mount(self, folder: Path, user: int | None) -> None:
        try:
            if self._mounts is not None:
                await self._mounts.mount(folder, mode=0o700, owner=user)
        except OSError as error:
            raise SandboxError(f"a sandbox's file system cannot be made: {error}") from error


def _make_folder(scratch: Path | None, user: int | None, places: Sequence[str]) -> Path:
    try:
        parent = make_held_folder(scratch)
        folder = parent / "box"
        folder.mkdir(mode=0o700)
        (parent / "root").mkdir(mode=0o755)
        if user is not None:
            parent.chmod(0o711)
            os.chown(folder, user, user)
        for place in places:
            made = folder / place.lstrip("/")
            made.mkdir(parents=True)
            if user is not None:
                os.chown(made, user, user)
    except OSError as error:
        raise SandboxError(f"a sandbox's folder cannot be made: {error}") from error
    return folder


def _has_ended(pid: str) -> bool:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()[0] in "ZX"
