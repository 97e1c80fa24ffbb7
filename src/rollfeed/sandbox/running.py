"""Runs one wrapped program to its end, or to the limit that ends it.

Invariant: when :func:`run` returns or raises, the program and all that it started are dead and waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, ExecResult
from rollfeed.sandbox.cgroups import Cgroup
from rollfeed.sandbox.own_time import OwnClock
from rollfeed.sandbox.usage import children, files_exceed, nameless_bytes, resident_bytes

_WATCH_SECONDS = 0.1
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_AGAIN_SECONDS = 0.05
_CHUNK_BYTES = 65_536
_STARTED = "started"
_T = TypeVar("_T")
_FIRST = asyncio.FIRST_COMPLETED


async def run(
    make_command: Callable[[int], Sequence[str]],
    *,
    entrances: Sequence[int] = (),
    stdin: bytes,
    limits: ExecLimits,
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    has_launcher: bool = True,
    has_init: bool = False,
    group: Cgroup | None = None,
    sweep: Callable[[], None] = lambda: None,
) -> ExecResult:
    """Run a program and collect what it did.

    Args:
        make_command: Returns the command line, given the descriptor that takes the launcher's status.
        entrances: Descriptors that the launcher is given as well, closed here once it has them.
        stdin: What the program reads.
        limits: What the program may use.
        folder: Watched for the program's files; None watches none.
        environment: Of the started process.
        has_launcher: Whether the launcher runs the program and reports its start; the time limit counts from there,
            and is of the program's own time. Else it is of the time that passes.
        has_init: Whether the started process has one child, the first of a process namespace, that takes all with it.
        group: Control group that the launcher joins.
        sweep: Kills what the program's process group does not hold, once the program has ended.

    Raises:
        SandboxError: If the program was not reached.
    """
    status, theirs = os.pipe()
    try:
        spawning = _spawn(make_command(theirs), (theirs, *entrances), environment)
        # asyncio's own way with a cancelled start kills the process, waits for its pipes, and knows of no descendants.
        (transport, protocol), cancelled = await settled(spawning)
    except OSError as error:
        os.close(status)
        raise SandboxError(f"a sandboxed program cannot be started: {error}") from error
    except BaseException:
        os.close(status)
        raise
    finally:
        for descriptor in (theirs, *entrances):
            os.close(descriptor)
    if not has_launcher:
        limits = replace(limits, patience=1.0)
    running = _RunningProgram(
        transport, protocol, limits=limits, folder=folder, has_init=has_init, group=group, sweep=sweep
    )
    if cancelled:
        os.close(status)
        return await running.finish(_cancelled(), stdin)
    if has_launcher:
        return await running.finish(_read_status(status), stdin)
    os.close(status)
    return await running.finish(_started(), stdin)


async def _spawn(
    command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
) -> tuple[asyncio.SubprocessTransport, _Protocol]:
    loop = asyncio.get_running_loop()
    return await loop.subprocess_exec(
        lambda: _Protocol(limit=_CHUNK_BYTES, loop=loop),
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=descriptors,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells of the process's end when it comes; asyncio's own waits for the pipes, which descendants may hold."""

    def __init__(self, *, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        self.exited.set()
        super().process_exited()


class _RunningProgram:
    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        protocol: _Protocol,
        *,
        limits: ExecLimits,
        folder: Path | None,
        has_init: bool,
        group: Cgroup | None,
        sweep: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._pid = transport.get_pid()
        self._limits = limits
        self._folder = folder
        self._has_init = has_init
        self._group = group
        self._clock: OwnClock | None = None
        self._sweep = sweep
        self._limit_reached: asyncio.Future[ExecOutcome] = asyncio.get_running_loop().create_future()
        self._stdout = bytearray()
        self._stderr = bytearray()

    async def finish(self, starting: Coroutine[Any, Any, str], stdin: bytes) -> ExecResult:
        loop = asyncio.get_running_loop()
        streams = self._protocol
        assert streams.stdin is not None
        assert streams.stdout is not None
        assert streams.stderr is not None
        work = [
            asyncio.create_task(self._wait()),
            asyncio.create_task(self._read(streams.stdout, self._stdout)),
            asyncio.create_task(self._read(streams.stderr, self._stderr)),
            asyncio.create_task(_feed(streams.stdin, stdin)),
        ]
        ending: asyncio.Future[Any] = asyncio.gather(*work)
        watching = asyncio.create_task(self._watch())
        try:
            state = await starting
            started = loop.time()
            if state == _STARTED:
                await self._await_end(ending)
            exited = ending.done()
            seconds = own_seconds = loop.time() - started
            if self._clock is not None:
                self._clock.tick(loop.time())
                own_seconds = self._clock.seconds
        finally:
            await uncancelled(self._end(work, watching))
            await asyncio.gather(ending, return_exceptions=True)
        if state != _STARTED:
            said = bytes(self._stderr[-500:]).decode(errors="replace")
            raise SandboxError(" ".join(f"a sandboxed program was not reached: {state} {said}".split()))
        outcome = ExecOutcome.EXITED if exited else self._overdue()
        if self._limit_reached.done():
            outcome = self._limit_reached.result()
        elif self._group is not None and self._group.was_out_of_memory():
            outcome = ExecOutcome.MEMORY_LIMIT
        elif exited and self._exit_code() == -signal.SIGXCPU:  # the kernel was there before our next look
            outcome = ExecOutcome.TIMEOUT
        return ExecResult(
            outcome=outcome,
            exit_code=self._exit_code() if outcome is ExecOutcome.EXITED else None,
            stdout=bytes(self._stdout),
            stderr=bytes(self._stderr),
            wall_seconds=seconds,
            own_seconds=own_seconds,
        )

    async def _await_end(self, ending: asyncio.Future[Any]) -> None:
        limits = self._limits
        if limits.patience > 1.0:
            used = None if self._group is None else self._group.cpu_seconds
            now = asyncio.get_running_loop().time()
            self._clock = OwnClock(self._pid, now=now, looks_every=_WATCH_SECONDS, used=used)
        most = limits.wall_seconds * limits.patience
        await asyncio.wait({ending, self._limit_reached}, timeout=most, return_when=_FIRST)

    def _overdue(self) -> ExecOutcome:
        return ExecOutcome.TIMEOUT if self._clock is None else ExecOutcome.STARVED

    def _exit_code(self) -> int | None:
        code = self._transport.get_returncode()
        # Bubblewrap and the reaper report a signal as shells do.
        return 128 - code if code is not None and 128 < code <= 128 + signal.NSIG else code

    async def _wait(self) -> None:
        await self._protocol.exited.wait()
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self._sweep()

    async def _end(self, work: Sequence[asyncio.Task[None]], watching: asyncio.Task[None]) -> None:
        watching.cancel()
        deadline = asyncio.get_running_loop().time() + _END_SECONDS
        while self._has_init and not all(task.done() for task in work) and asyncio.get_running_loop().time() < deadline:
            # So that the started process waits for it, and no other has to; it may not have been made yet.
            for pid in children(self._pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.wait(work, timeout=_AGAIN_SECONDS)
        self._kill()
        await asyncio.wait(work, timeout=_END_SECONDS)
        self._transport.close()
        for task in (*work, watching):
            task.cancel()
        await asyncio.gather(*work, watching, return_exceptions=True)

    async def _read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while chunk := await stream.read(_CHUNK_BYTES):
            room = self._limits.max_output_bytes - len(into)
            into += chunk[:room]
            if len(chunk) > room:
                self._stop(ExecOutcome.OUTPUT_LIMIT)

    def _stop(self, outcome: ExecOutcome) -> None:
        if not self._limit_reached.done():
            self._limit_reached.set_result(outcome)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._look_at_clock()
            if self._group is not None and self._group.was_out_of_memory():
                self._stop(ExecOutcome.MEMORY_LIMIT)
            if resident_bytes(self._pid, at_most=self._limits.memory_bytes) > self._limits.memory_bytes:
                self._stop(ExecOutcome.MEMORY_LIMIT)
            if self._folder is not None and files_exceed(
                self._folder, num_files=self._limits.max_files, num_bytes=self._limits.max_file_bytes
            ):
                self._stop(ExecOutcome.FILE_LIMIT)
            if self._folder is not None and nameless_bytes(self._pid) > self._limits.max_file_bytes:
                self._stop(ExecOutcome.FILE_LIMIT)

    def _look_at_clock(self) -> None:
        if (clock := self._clock) is None:
            return
        clock.tick(asyncio.get_running_loop().time())
        wall_seconds, cpu_seconds = self._limits.wall_seconds, self._limits.cpu_seconds
        if clock.seconds > wall_seconds or clock.cpu_seconds > (wall_seconds if cpu_seconds is None else cpu_seconds):
            self._stop(ExecOutcome.TIMEOUT)


async def _feed(stream: asyncio.StreamWriter, stdin: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its input
        stream.write(stdin)
        await stream.drain()
        stream.close()


async def _started() -> str:
    return _STARTED


async def _cancelled() -> str:
    raise asyncio.CancelledError


async def settled(work: Coroutine[Any, Any, _T]) -> tuple[_T, bool]:
    """Return the result of ``work``, and whether this task was cancelled meanwhile."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def _read_status(status: int) -> str:
    """Return what the launcher says, or nothing when it was not reached."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status, "rb", buffering=0)
    )
    try:
        async with asyncio.timeout(_START_SECONDS):
            return (await reader.read(_CHUNK_BYTES)).decode(errors="replace")
    except TimeoutError:
        return f"it was not ready after {_START_SECONDS:g} s"
    finally:
        transport.close()


async def uncancelled(work: Awaitable[None]) -> None:
    """Finish ``work`` also when this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
