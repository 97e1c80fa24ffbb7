"""Sandboxes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecResult, Isolation, IsolationLevel
from rollfeed.sandbox.files import delete_folder, make_held_folder, read_within, write_within
from rollfeed.sandbox.running import run
from rollfeed.sandbox.wrapping import pick_user, wrap

_SWEEPS = 100


class LocalSandbox:
    """A folder of this machine, and programs in it at one isolation level.

    Args:
        folder: The sandbox's own, empty; nothing else is in its parent but what isolation needs.
        level: How programs are kept from the machine.
        user: Owner of the folder and of the programs, or None for who we are.
        turns: Held while a program runs.
        places: As :func:`rollfeed.sandbox.wrapping.wrap` takes them.
        has_network: Whether programs have the machine's.
    """

    def __init__(
        self,
        *,
        folder: Path,
        level: IsolationLevel,
        user: int | None,
        turns: asyncio.Semaphore,
        places: Sequence[str],
        has_network: bool,
    ) -> None:
        self._folder = folder
        self._level = level
        self._user = user
        self._turns = turns
        self._places = places
        self._has_network = has_network
        self._marker = os.urandom(12).hex()

    async def exec(self, command: Sequence[str], *, stdin: bytes = b"", limits: ExecLimits) -> ExecResult:
        if not command:
            raise SandboxError("the command is empty")

        def make_command(status: int) -> list[str]:
            return wrap(
                self._level,
                command,
                folder=self._folder,
                user=self._user,
                marker=self._marker,
                limits=limits,
                status=status,
                places=self._places,
                has_network=self._has_network,
            )

        async with self._turns:
            own = self._level is not IsolationLevel.LIMITS
            sweep = (lambda: None) if own else self._kill_escaped
            return await run(make_command, stdin=stdin, limits=limits, folder=self._folder, has_init=own, sweep=sweep)

    async def read(self, path: str, *, max_bytes: int = 64 * 1024**2) -> bytes:
        return await asyncio.to_thread(read_within, self._folder, path, max_bytes=max_bytes)

    async def write(self, path: str, content: bytes) -> None:
        await asyncio.to_thread(write_within, self._folder, path, content, owner=self._user)

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


class LocalSandboxes:
    """Makes sandboxes on this machine; :func:`rollfeed.sandbox.start_sandboxes` finds out what it can do.

    At most ``max_running`` programs of all sandboxes run at once; more wait, and their time limits with them.
    ``places`` are absolute paths that programs write to instead of ``/box``, none within another: the first is their
    home, and the sandbox's folder has them below it. With ``has_network`` they have the machine's.
    """

    def __init__(
        self,
        *,
        isolation: Isolation,
        max_running: int,
        scratch: Path | None = None,
        places: Sequence[str] = (),
        has_network: bool = False,
    ) -> None:
        self.isolation = replace(isolation, network_cut=isolation.network_cut and not has_network)
        self._places = places
        self._has_network = has_network
        self._scratch = scratch
        self._turns = asyncio.Semaphore(max_running)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LocalSandbox]:
        """Make an empty sandbox; its files are deleted on leaving. Raises SandboxError if its folder cannot be made."""
        user = pick_user()
        folder = _make_folder(self._scratch, user, self._places)
        try:
            yield LocalSandbox(
                folder=folder,
                level=self.isolation.level,
                user=user,
                turns=self._turns,
                places=self._places,
                has_network=self._has_network,
            )
        finally:
            await asyncio.to_thread(delete_folder, folder.parent)


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
