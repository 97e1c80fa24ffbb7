"""Sandboxes of a container engine with Docker's command line: ``docker``, ``podman`` and the like.

A sandbox is a container that sleeps; programs are executed in it. Leaving the sandbox removes it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rollfeed.errors import ConfigError, SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult, Isolation, IsolationLevel
from rollfeed.sandbox.files import parts_within
from rollfeed.sandbox.running import run, uncancelled

_FOLDER = "/box"
# A number that nobody has on the machine, so that what is meant for this user can never meet another's processes.
_USER = "61061"
_ENGINE_LIMITS = ExecLimits(wall_seconds=120.0, max_output_bytes=65 * 1024**2)
_FILES = ExecLimits(wall_seconds=60.0, max_output_bytes=65 * 1024**2)
# Becomes the program within limits that are its own; the container's hold for all of them together.
_LIMITED = 'ulimit -c 0; ulimit -t "$1"; ulimit -f "$2"; ulimit -n "$3"; shift 3; exec "$@"'
# Ends all but the first process and the shell that says it; were it not run inside, it would end nothing.
_KILL_ALL = f'[ "$(id -u)" = {_USER} ] || exit 64; kill -KILL -1 2>/dev/null; exit 0'
# The first process of the container: outlives the killing of all others, and takes leave of the dead.
_IDLE = "while :; do sleep 3600 & wait; done"
_BLOCK_BYTES = 512


class ContainerSandbox:
    """One running container; its folder is ``/box``."""

    def __init__(self, *, engine: _Engine, container: str, turns: asyncio.Semaphore) -> None:
        self._engine = engine
        self._container = container
        self._turns = turns

    async def exec(self, command: Sequence[str], *, stdin: bytes = b"", limits: ExecLimits) -> ExecResult:
        if not command:
            raise SandboxError("the command is empty")
        cpu_seconds = limits.wall_seconds if limits.cpu_seconds is None else limits.cpu_seconds
        numbers = (int(cpu_seconds) + 1, limits.max_file_bytes // _BLOCK_BYTES, limits.max_open_files)
        limited = ["sh", "-c", _LIMITED, "sh", *map(str, numbers), *command]
        async with self._turns:
            try:
                return await self._run(limited, stdin=stdin, limits=limits)
            finally:
                await uncancelled(self._kill_all())

    async def _kill_all(self) -> None:
        """End what runs inside, which ending the engine's client does not, and see that the container is there."""
        killed = await self._run(["sh", "-c", _KILL_ALL], stdin=b"", limits=_FILES)
        if killed.exit_code != 0:
            raise SandboxError(f"the container is out of order (exit code {killed.exit_code}): {_said(killed)}")

    async def read(self, path: str, *, max_bytes: int = 64 * 1024**2) -> bytes:
        script = '[ -f "$1" ] && [ ! -L "$1" ] && head -c "$2" -- "$1"'
        name = "/".join(parts_within(path))
        result = await self._run(["sh", "-c", script, "sh", f"./{name}", str(max_bytes + 1)], stdin=b"", limits=_FILES)
        if result.outcome is not ExecOutcome.EXITED or result.exit_code != 0:
            raise SandboxError(f"{path!r:.200} cannot be read: {_said(result) or 'there is no such plain file'}")
        if len(result.stdout) > max_bytes:
            raise SandboxError(f"{path!r:.200} is larger than {max_bytes} bytes")
        return result.stdout

    async def write(self, path: str, content: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$1")" && rm -f -- "$1" && cat > "$1"'
        name = "/".join(parts_within(path))
        result = await self._run(["sh", "-c", script, "sh", f"./{name}"], stdin=content, limits=_FILES)
        if result.outcome is not ExecOutcome.EXITED or result.exit_code != 0:
            raise SandboxError(f"{path!r:.200} cannot be written: {_said(result)}")

    async def _run(self, command: Sequence[str], *, stdin: bytes, limits: ExecLimits) -> ExecResult:
        return await self._engine.run("exec", "-i", self._container, *command, stdin=stdin, limits=limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The containers that sandboxes are."""

    engine: str = "docker"
    """The engine's command, for example ``docker`` or ``podman``."""
    image: str
    """Has ``sh`` with the usual commands and, for programs in Python, ``python3``."""
    memory_bytes: int = ExecLimits().memory_bytes
    """Of a container; an ``exec`` cannot have more."""


class ContainerSandboxes:
    """Makes a container for each sandbox, without network, capabilities and new privileges.

    Raises:
        ConfigError: If the engine's command is not installed.
    """

    def __init__(self, container: Container, *, max_running: int) -> None:
        engine, image = container.engine, container.image
        found = shutil.which(engine)
        if found is None:
            raise ConfigError(f"container engine {engine!r}: no such command; install it or choose another isolation")
        self._engine = _Engine(found)
        self._image = image
        self._limits = ExecLimits(memory_bytes=container.memory_bytes)
        self._turns = asyncio.Semaphore(max_running)
        self.isolation = Isolation(
            level=IsolationLevel.CONTAINER,
            network_cut=True,
            files_hidden=True,
            detail=f"{engine} runs image {image}; as strong as this engine is set up",
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ContainerSandbox]:
        """Start a container; leaving removes it. Raises SandboxError if the engine does not start it."""
        name = f"rollfeed-{os.urandom(8).hex()}"
        try:
            await self._engine.ask(*self._start_arguments(name))
        except BaseException:
            # It may have been made all the same.
            with suppress(SandboxError):
                await uncancelled(self._remove(name))
            raise
        try:
            yield ContainerSandbox(engine=self._engine, container=name, turns=self._turns)
        finally:
            await uncancelled(self._remove(name))

    async def _remove(self, name: str) -> None:
        await self._engine.ask("rm", "--force", "--volumes", name)

    def _start_arguments(self, name: str) -> list[str]:
        memory = str(self._limits.memory_bytes)
        return [
            *("run", "--detach", "--name", name, "--network", "none"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(self._limits.max_processes)),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{_USER}:{_USER}"),
            *("--workdir", _FOLDER, "--tmpfs", f"{_FOLDER}:rw,exec,mode=1777,size={self._limits.max_file_bytes}"),
            *("--tmpfs", f"/tmp:rw,mode=1777,size={self._limits.max_file_bytes}", "--read-only"),
            *("--env", f"HOME={_FOLDER}", "--entrypoint", "sh", self._image, "-c", _IDLE),
        ]


class _Engine:
    """The command line of a container engine."""

    def __init__(self, command: str) -> None:
        self._command = command

    async def run(self, *arguments: str, stdin: bytes, limits: ExecLimits) -> ExecResult:
        """Run the engine; what it reports is the program's."""
        return await run(
            lambda status: [self._command, *arguments],
            stdin=stdin,
            limits=limits,
            environment=os.environ,
            has_launcher=False,
        )

    async def ask(self, *arguments: str) -> str:
        """Run the engine and return the last line that it printed."""
        result = await self.run(*arguments, stdin=b"", limits=_ENGINE_LIMITS)
        if result.outcome is not ExecOutcome.EXITED or result.exit_code != 0:
            raise SandboxError(f"{self._command} {arguments[0]} failed: {_said(result)}")
        return result.stdout.decode(errors="replace").strip().rpartition("\n")[2]


def _said(result: ExecResult) -> str:
    return " ".join(result.stderr[-500:].decode(errors="replace").split())
