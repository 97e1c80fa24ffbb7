"""One worker process: started, asked, killed.

Invariant: a process that was started has been killed with its whole group and waited for when
:meth:`WorkerProcess.kill` returns, however it came to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.errors import WorkerCallError, WorkerDiedError, WorkerTimeoutError
from rollfeed.logs import RUN_LOG
from rollfeed.workers import child

_HEAD_BYTES = 4
_MAX_HEADER_BYTES = 4_096
_POLL_SECONDS = 0.01
_END_SECONDS = 1.0
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}
"""Accelerators belong to the engine."""
_ANY_TEXT = {"PYTHONIOENCODING": "utf-8:backslashreplace"}
"""What a function prints must not end it."""


class Channel(asyncio.Protocol):
    """One end of a worker's socket: one request, then one reply, in turns."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._reply: asyncio.Future[bytes | None] | None = None
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < _HEAD_BYTES:
            return
        (length,) = struct.unpack_from("!I", self._received)
        if length > child.MAX_FRAME_BYTES + _MAX_HEADER_BYTES:
            self.close()
        elif len(self._received) >= _HEAD_BYTES + length:
            frame = bytes(self._received[_HEAD_BYTES : _HEAD_BYTES + length])
            # A worker speaks when it is spoken to: what follows a reply is no reply.
            self._received.clear()
            self._deliver(frame)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._closed = True
        self._deliver(None)

    async def ask(self, frame: bytes) -> bytes | None:
        """Send a request and return the reply, or None when the worker has gone."""
        if self._closed or self._transport is None:
            return None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(struct.pack("!I", len(frame)) + frame)
        try:
            return await self._reply
        finally:
            self._reply = None

    def close(self) -> None:
        """Close the socket at once; an idle worker ends at that."""
        if self._transport is not None:
            self._transport.abort()

    def _deliver(self, frame: bytes | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(frame)


class WorkerProcess:
    """A running worker, ready for calls.

    Attributes:
        num_calls: Calls it has answered.
        resident_bytes: Its memory after the last answer.
        spent: Whether it must not be called again: it died, was killed, or ran out of memory.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self._channel = channel
        self._loaded: set[str] = set()
        self._threads = 1
        self.num_calls = 0
        self.resident_bytes = 0
        self.spent = False

    @classmethod
    async def start(
        cls,
        *,
        memory_limit_bytes: int | None,
        warm_up: Sequence[str],
        start_timeout_seconds: float,
        hash_seed: int,
        output: Path | None = None,
        threads: int = 1,
        sees_devices: bool = False,
    ) -> WorkerProcess:
        """Start a process and return when its warm-up modules are imported.

        What its functions print goes to the end of ``output``, and nowhere by default; ``threads`` are those that they
        may compute in, and ``sees_devices`` leaves them the accelerators.

        Raises:
            WorkerDiedError: If it cannot be started, or is not ready in time.
            WorkerCallError: If a warm-up module cannot be imported.
        """
        hidden = {} if sees_devices else _NO_DEVICES
        computing = {**hidden, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        worker = await cls._spawn(hash_seed, output, computing)
        worker._threads = threads
        settings = {
            "sys_path": _module_folders(),
            "memory_limit_bytes": memory_limit_bytes,
            "warm_up": list(warm_up),
            "log": None if output is None else str(output.with_name(RUN_LOG)),
        }
        try:
            await worker._ask({"do": "start", "seconds": start_timeout_seconds}, json.dumps(settings))
        except WorkerTimeoutError as error:
            raise WorkerDiedError(f"a worker process was not ready after {start_timeout_seconds:g} s") from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    @classmethod
    async def _spawn(cls, hash_seed: int, output: Path | None, computing: Mapping[str, str]) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        try:
            output = Path(os.devnull) if output is None else output
            with theirs, os.fdopen(os.open(output, _APPENDING, 0o644), "ab") as printed:
                command = [sys.executable, "-P", str(Path(child.__file__)), str(theirs.fileno()), str(os.getpid())]
                process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own starts a thread for each process
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, **computing, **_ANY_TEXT, "PYTHONHASHSEED": str(hash_seed)},
                )
        except OSError as error:
            ours.close()
            raise WorkerDiedError(f"a worker process cannot be started: {error}") from error
        worker = cls(process, Channel())
        try:
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: worker._channel, sock=ours)
        except BaseException:
            ours.close()
            await worker.kill()
            raise
        return worker

    async def call(self, function_path: str, args_json: str, *, deadline_seconds: float, load_seconds: float) -> str:
        """Call a function and return its result as JSON. After a timeout or a cancellation the process is gone.

        Importing the function's module, once a process, has ``load_seconds`` of its own.

        Raises:
            WorkerTimeoutError: If it is not done in time.
            WorkerDiedError: If the process dies.
            WorkerCallError: If the function cannot be found or raises.
        """
        if function_path not in self._loaded:
            await self._ask({"do": "load", "function": function_path, "seconds": load_seconds}, "null")
            self._loaded.add(function_path)
        return await self._ask({"do": "call", "function": function_path, "seconds": deadline_seconds}, args_json)

    async def _ask(self, header: dict[str, Any], body: str) -> str:
        frame = f"{json.dumps({**header, 'threads': self._threads})}\n{body}".encode()
        if len(frame) > child.MAX_FRAME_BYTES:
            raise WorkerCallError(f"the arguments are larger than {child.MAX_FRAME_BYTES} bytes")
        try:
            async with asyncio.timeout(header["seconds"]):
                reply = await self._channel.ask(frame)
        except TimeoutError as error:
            await self.kill()
            raise WorkerTimeoutError(f"no result within {header['seconds']:g} s; its process was killed") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if reply is None:
            try:
                await self._end_by_itself()
            finally:
                await self.kill()
            raise WorkerDiedError(f"the worker process ended before it answered: {self._how_it_ended()}")
        head, _, text = reply.partition(b"\n")
        state = json.loads(head)
        self.num_calls += 1
        self.resident_bytes = state["resident_bytes"]
        if state["status"] == "ok":
            return text.decode()
        # What follows a MemoryError in the same process cannot be relied on.
        self.spent = self.spent or state["status"] == "memory"
        raise WorkerCallError(json.loads(text))

    async def kill(self) -> None:
        """Kill the process and all of its group, and wait for its end."""
        self.spent = True
        self._channel.close()
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        ending = asyncio.ensure_future(_ended(self._process.pid))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise
        finally:
            self._process.poll()

    async def _end_by_itself(self) -> None:
        """Let the process come to its own end, so that its cause can be told, and kill what is left of its group."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await _ended(self._process.pid)
        await self.kill()

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by signal {-code} ({_SIGNAL_NAMES.get(-code, 'unnamed')})"
        return f"exit code {code}"


def _module_folders() -> list[str]:
    """Return where modules are found here; the empty entry means the current folder."""
    return [path or os.getcwd() for path in sys.path if path is not None]


async def _ended(pid: int) -> None:
    """Return when a child has ended; it stays to be waited for, so that its number and its group's stay its own."""
    loop = asyncio.get_running_loop()
    try:
        watched = os.pidfd_open(pid)
    except (OSError, AttributeError):
        await _ended_polled(pid)
        return
    ended = asyncio.Event()
    try:
        loop.add_reader(watched, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


async def _ended_polled(pid: int) -> None:
    """As ``_ended``, where the kernel has no descriptors of processes."""
    has_ended = False
    while not has_ended:
        try:
            has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None  # noqa: ASYNC222
        except ChildProcessError:  # waited for meanwhile
            return
        await asyncio.sleep(0 if has_ended else _POLL_SECONDS)
