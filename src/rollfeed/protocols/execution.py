"""Running what may hang, crash or do harm: our own functions in workers, programs of models in sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Workers(Protocol):
    """Calls plain functions by name in processes that can be killed."""

    async def call(
        self, function_path: str, args: Sequence[Any], *, deadline_seconds: float, cached: bool = False
    ) -> Any:
        """Call ``package.module.function`` and return its result as JSON values.

        Args:
            function_path: Importable by name; never of ``__main__``.
            args: JSON values.
            deadline_seconds: Counts from the call's turn.
            cached: Whether the result of an equal earlier call will do.

        Raises:
            WorkerError: If there is no result: timed out, died or raised, by subclass.
        """


class IsolationLevel(StrEnum):
    """The barrier between a model's program and the machine, strongest first."""

    CONTAINER = "container"
    """A container engine's; as strong as that engine is set up."""
    BUBBLEWRAP = "bubblewrap"
    """Its own root, network, processes and user, made by ``bwrap``."""
    NAMESPACES = "namespaces"
    """As ``BUBBLEWRAP``, made here from the kernel's namespaces."""
    LIMITS = "limits"
    """Resource limits only: a program sees the machine's files and network. Not a security boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The isolation in force, for people and for the run's records."""

    level: IsolationLevel
    network_cut: bool
    """Whether programs are kept from the network."""
    files_hidden: bool
    """Whether programs see none of the machine's files but the system's and the interpreter's."""
    detail: str
    """What was tried and found, in one line."""

    def __str__(self) -> str:
        network = "no network" if self.network_cut else "NETWORK OPEN"
        files = "own files only" if self.files_hidden else "MACHINE'S FILES VISIBLE"
        return f"programs run at isolation level {self.level.value} ({network}, {files}): {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecLimits:
    """Limits of one program."""

    wall_seconds: float = 6.0
    """Of the program's own time: on a core or asleep, without the time in which it waits for a core."""
    patience: float = 10.0
    """How many times ``wall_seconds`` may pass while the machine does not give the program its share of the cores."""
    cpu_seconds: float | None = None
    """Of all its processes together, those that have ended included; None takes ``wall_seconds``."""
    memory_bytes: int = 1024**3
    """Address space of each process, and resident memory of all together."""
    max_processes: int = 32
    max_output_bytes: int = 1024**2
    """Of standard output and standard error, each."""
    max_file_bytes: int = 64 * 1024**2
    """Of each file, of the temporary folder, and of all files in the sandbox's folder together."""
    max_files: int = 1_000
    """In the sandbox's folder."""
    max_open_files: int = 128


class ExecOutcome(StrEnum):
    """The way in which a program ended."""

    EXITED = "exited"
    """By itself, well or not: see ``exit_code``."""
    TIMEOUT = "timeout"
    """Killed when its own time was over ``wall_seconds``, or ``cpu_seconds``."""
    STARVED = "starved"
    """Killed when ``patience`` was over: the machine was too busy to say whether the program is too slow."""
    OUTPUT_LIMIT = "output_limit"
    """Killed because it wrote more than ``max_output_bytes``."""
    MEMORY_LIMIT = "memory_limit"
    """Killed because its processes together held more than ``memory_bytes``."""
    FILE_LIMIT = "file_limit"
    """Killed because its folder held more than ``max_file_bytes`` or ``max_files``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The output and the end of a program."""

    outcome: ExecOutcome
    exit_code: int | None
    """Negative is the number of the signal that ended it; None unless it exited by itself."""
    stdout: bytes = field(repr=False)
    """At most ``max_output_bytes``."""
    stderr: bytes = field(repr=False)
    wall_seconds: float
    own_seconds: float = 0.0
    """The program's own time, which its limit is of."""


class Sandbox(Protocol):
    """One private folder, and programs that run in it. Files stay from one program to the next."""

    async def exec(self, command: Sequence[str], *, stdin: bytes = b"", limits: ExecLimits) -> ExecResult:
        """Run a program in the folder to its end, or until a limit ends it; nothing it started survives.

        It gets none of this process's environment. ``python3`` as first word is an interpreter.

        Raises:
            SandboxError: If it could not be run at all.
        """

    async def read(self, path: str, *, max_bytes: int = 64 * 1024**2) -> bytes:
        """Return a file of the folder, by its path in it.

        Raises:
            SandboxError: If there is no such plain file in the folder, or it is larger.
        """

    async def write(self, path: str, content: bytes) -> None:
        """Make or replace a file of the folder, and the folders on its way.

        Raises:
            SandboxError: If the path leaves the folder or cannot be written.
        """


class SandboxProvider(Protocol):
    """Makes sandboxes. *Extension point*."""

    @property
    def isolation(self) -> Isolation:
        """The barrier between the programs and the machine."""

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """Return a new, empty sandbox to enter; leaving it deletes its files and ends its programs."""
