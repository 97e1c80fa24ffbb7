"""Finds the strongest isolation level that holds on this machine, by trying what programs must not be able to do."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed.base.cores import num_cores
from rollfeed.errors import ConfigError, SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult, Isolation, IsolationLevel, Sandbox
from rollfeed.sandbox.container import Container, ContainerSandboxes
from rollfeed.sandbox.local import LocalSandboxes

_log = logging.getLogger(__name__)

_LEVELS = (IsolationLevel.BUBBLEWRAP, IsolationLevel.NAMESPACES)
"""Taken without being asked for, the stronger first: each is a barrier."""
_TOOLS = {IsolationLevel.BUBBLEWRAP: "bwrap", IsolationLevel.NAMESPACES: "unshare"}
_OWN_PROCESSES = 2
"""A program and the first process of its namespace."""
_CANARY, _CANARY_SECONDS = ".rollfeed-canary-", 600.0
"""The name of a file that programs must not see, and the time after which nobody looks for it any more."""
_LIMITS = ExecLimits(wall_seconds=20.0, memory_bytes=512 * 1024**2, max_processes=8)

# Tries out what the isolation must prevent, and says what it could do.
_PROBE = """
import json, os, signal, socket, sys
processes = sum(name.isdigit() for name in os.listdir("/proc"))
children = []
try:
    while len(children) < 20:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
try:
    bytearray(1 << 30)
    memory_limited = False
except MemoryError:
    memory_limited = True
print(json.dumps({
    "interfaces": [name for _, name in socket.if_nameindex()],
    "sees_canary": [path for path in sys.argv[1:] if os.path.exists(path)],
    "processes": processes,
    "environment": sorted(os.environ),
    "forks": len(children),
    "memory_limited": memory_limited,
    "calls_filtered": "\\nSeccomp:\\t2\\n" in open("/proc/self/status").read(),
}))
"""


async def start_sandboxes(
    *,
    level: IsolationLevel | None = None,
    max_running: int | None = None,
    scratch: Path | None = None,
    container: Container | None = None,
    private: Sequence[Path] = (),
) -> LocalSandboxes | ContainerSandboxes:
    """Return sandboxes at ``level``, or at the strongest level of this machine's own that holds here.

    Whether a level holds is tried out, so this takes some tenths of a second. ``limits``, which is no barrier, is
    taken where it is asked for only; at most ``max_running`` programs run at once, by default as many as there are
    cores.

    That programs do not see this process's home, working and temporary folder is tried, and ``private`` ones.

    Raises:
        ConfigError: If ``level`` does not hold here, or none does.
    """
    running = max_running if max_running is not None else num_cores()
    if level is IsolationLevel.CONTAINER:
        if container is None:
            raise ConfigError("isolation level container: say which containers")
        return await _tried_containers(container, max_running=running)
    refusals: list[str] = []
    for candidate in (level,) if level is not None else _LEVELS:
        found = await _try(candidate, scratch=scratch, private=private)
        if isinstance(found, Isolation):
            found = _with_refusals(found, refusals)
            return LocalSandboxes(isolation=found, max_running=running, scratch=scratch)
        refusals.append(f"{candidate.value}: {found}")
    raise ConfigError(
        f"programs cannot be isolated here ({'; '.join(refusals)}): install bubblewrap (bwrap), allow it namespaces, "
        'or use reward.code.isolation = "container"; "limits", only by that name, runs them without a barrier'
    )


async def _tried_containers(container: Container, *, max_running: int) -> ContainerSandboxes:
    sandboxes = ContainerSandboxes(container, max_running=max_running)
    where = f"isolation level container: {container.engine} with image {container.image}"
    try:
        async with sandboxes.open() as sandbox:
            result = await sandbox.exec(["python3", "-c", "print(1)"], limits=_LIMITS)
    except SandboxError as error:
        raise ConfigError(f"{where}: {error}") from error
    if result.stdout.strip() != b"1":
        raise ConfigError(f"{where}: python3 does not run in it ({_said(result)})")
    return sandboxes


def _put_canaries(folders: Iterable[str | Path]) -> list[str]:
    """Make a file in each folder that this process may write to; what killed processes have left there goes."""
    made, oldest = [], time.time() - _CANARY_SECONDS
    for folder in dict.fromkeys(map(os.path.realpath, folders)):
        for left in Path(folder).glob(f"{_CANARY}*"):
            with suppress(OSError):
                if left.lstat().st_mtime < oldest:
                    left.unlink()
        with suppress(OSError):
            file, path = tempfile.mkstemp(prefix=_CANARY, dir=folder)
            os.close(file)
            made.append(path)
    return made


async def _try(level: IsolationLevel, *, scratch: Path | None, private: Sequence[Path]) -> Isolation | str:
    """Return the isolation at ``level`` as it was found, or why it does not hold."""
    if (tool := _TOOLS.get(level)) is not None and shutil.which(tool) is None:
        return f"{tool} is not installed"
    unproven = Isolation(level=level, network_cut=False, files_hidden=False, detail="being tried")
    folders = [scratch or tempfile.gettempdir()]
    if level is not IsolationLevel.LIMITS:
        folders += [Path.home(), Path.cwd(), *private]
    canaries = await asyncio.to_thread(_put_canaries, folders)
    try:
        sandboxes = LocalSandboxes(isolation=unproven, max_running=1, scratch=scratch)
        async with sandboxes.open() as sandbox:
            result = await sandbox.exec(["python3", "-I", "-S", "-c", _PROBE, *canaries], limits=_LIMITS)
    except SandboxError as error:
        return str(error)
    finally:
        for canary in canaries:
            with suppress(OSError):
                await asyncio.to_thread(os.unlink, canary)
    if result.outcome is not ExecOutcome.EXITED or result.exit_code != 0:
        return f"the trial was not done ({_said(result)})"
    return judge(level, json.loads(result.stdout), lacking=sandboxes.lacking)


def judge(level: IsolationLevel, seen: Mapping[str, Any], *, lacking: Sequence[str] = ()) -> Isolation | str:
    """Return the isolation that a trial's findings prove, or what they disprove; ``lacking`` is told with it."""
    if not 0 < seen["forks"] < 20:
        return f"processes are not limited: {seen['forks']} could be made"
    if not seen["memory_limited"]:
        return "memory is not limited"
    network_cut = set(seen["interfaces"]) <= {"lo"}
    if level is not IsolationLevel.LIMITS:
        if not network_cut:
            return "the network is reachable"
        if seen["sees_canary"]:
            folders = ", ".join(sorted({os.path.dirname(path) for path in seen["sees_canary"]}))
            return f"the machine's files are visible: {folders} (data and runs do not belong below /usr)"
        if seen["processes"] > _OWN_PROCESSES:
            return "the machine's processes are visible"
    hidden = level is not IsolationLevel.LIMITS
    most = "a kernel of their own" if hidden else "a barrier: they see this machine's files and processes"
    filtered = [] if seen["calls_filtered"] else ["a filter of system calls, which this kind of machine has none for"]
    lacking = [most, *filtered, *lacking]
    detail = f"limits on time, memory, processes, files and output were tried and hold; not given: {'; '.join(lacking)}"
    return Isolation(level=level, network_cut=network_cut, files_hidden=hidden, detail=detail)


def _with_refusals(found: Isolation, refusals: list[str]) -> Isolation:
    if not refusals:
        return found
    return replace(found, detail=f"{found.detail}; not available: {'; '.join(refusals)}")


def _said(result: ExecResult) -> str:
    said = " ".join(result.stderr[-200:].decode(errors="replace").split())
    return f"{result.outcome.value}, exit code {result.exit_code}: {said}"


class OnDemandSandboxes:
    """Sandboxes of which the first one tries out which isolation level holds, and says it in the log.

    Parameters are those of :func:`start_sandboxes`; ``on_isolation`` is told once which isolation is in force.
    """

    def __init__(
        self,
        *,
        level: IsolationLevel | None = None,
        max_running: int | None = None,
        container: Container | None = None,
        on_isolation: Callable[[Isolation], None] | None = None,
        private: Sequence[Path] = (),
    ) -> None:
        self.private = list(private)
        """Folders that programs must not see."""
        self._start = partial(start_sandboxes, level=level, max_running=max_running, container=container)
        self._on_isolation = on_isolation
        self._starting = asyncio.Lock()
        self._sandboxes: LocalSandboxes | ContainerSandboxes | None = None
        self._refusal: ConfigError | None = None

    @property
    def isolation(self) -> Isolation:
        """The isolation that keeps programs from the machine.

        Raises:
            SandboxError: If that has not been found out yet; :meth:`start` does.
        """
        if self._sandboxes is None:
            raise SandboxError("no sandbox has been opened yet, so that the isolation level is not known")
        return self._sandboxes.isolation

    async def start(self) -> LocalSandboxes | ContainerSandboxes:
        """Find out the isolation, unless it is known.

        Raises:
            ConfigError: If the level does not hold here, or none does.
        """
        async with self._starting:
            if self._refusal is not None:
                raise self._refusal
            if self._sandboxes is None:
                try:
                    sandboxes = await self._start(private=self.private)
                except ConfigError as error:
                    self._refusal = error
                    raise
                log = _log.info if sandboxes.isolation.files_hidden else _log.warning
                log("%s", sandboxes.isolation)
                if self._on_isolation is not None:
                    self._on_isolation(sandboxes.isolation)
                self._sandboxes = sandboxes
            return self._sandboxes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """Make an empty sandbox. Raises SandboxError if it cannot be made, or the isolation level does not hold."""
        try:
            sandboxes = await self.start()
        except ConfigError as error:
            raise SandboxError(str(error)) from error
        async with sandboxes.open() as sandbox:
            yield sandbox
