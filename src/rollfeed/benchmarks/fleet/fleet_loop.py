"""An event loop whose time is what this side computes, and what it waits for takes none: a fleet on one machine.

Time passes by the processor time of the process, but for what :class:`SimulatedWork` counts as the servers' own, and
jumps to the next timer when nothing is left to do. So an hour of a fleet takes as long as this side computes in it, and
a side that is too slow for its fleet is late in it, as it would be with a core of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from rollfeed.testing.virtual_loop import VirtualTimeLoop

_POLL_SECONDS = 0.002
"""Between two looks at the time while threads work: what is due then is done meanwhile."""
_UNREAD_BYTES = 1 << 18
"""About what an operating system holds of a connection before its writer must wait."""
_FIRST_PORT = 1024
_READINGS = 500
_NOBODY = asyncio.Protocol()
"""At the end of a connection that is lost."""


class StandstillError(RuntimeError):
    """Nothing is left that could ever happen."""


def seconds_of_reading(clock: Callable[[], float]) -> float:
    """Return the processor time that it takes to read a clock of processor time."""
    began = clock()
    for _ in range(_READINGS):
        clock()
    return (clock() - began) / _READINGS


class SimulatedWork:
    """The processor time that goes into servers and into measuring, in seconds; it is nobody's on this side."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth, self._began = 0, 0.0
        self._reading_seconds = seconds_of_reading(time.thread_time)

    def counted(self) -> Self:
        """Count what a block computes; blocks within blocks count once."""
        return self

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._began = time.thread_time()

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if not self._depth:
            # One reading is within what was counted, and the other is nobody's on this side either.
            self.seconds += time.thread_time() - self._began + self._reading_seconds


class FleetLoop(VirtualTimeLoop):
    """Connects to servers that listen on it, in memory; there are no others."""

    def __init__(self) -> None:
        self.work = SimulatedWork()
        self._reading_seconds = seconds_of_reading(time.process_time)
        self._began = time.process_time()
        self._computed_seconds = 0.0
        self._listening: dict[int, Callable[[], asyncio.BaseProtocol]] = {}
        super().__init__()

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return super().time() + self._computed_seconds

    def _run_once(self) -> None:
        # Once a turn, as a reading is a call of the system, which may take longer than what is measured.
        self.work.seconds += self._reading_seconds
        computed = time.process_time() - self._began - self.work.seconds
        self._computed_seconds = max(self._computed_seconds, computed)
        super()._run_once()  # type: ignore[misc]

    def pass_time(self, seconds: float | None) -> float | None:
        """As its base; raises StandstillError where there is nothing to wait for."""
        if self.has_threads:
            return _POLL_SECONDS
        if seconds is None:
            raise StandstillError("nothing is left that could happen: no timer, no thread and no byte")
        return super().pass_time(seconds)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen at a port of this loop; 0 takes a free one."""
        number = port or next(
            each for each in range(len(self._listening) + _FIRST_PORT, 1 << 16) if each not in self._listening
        )
        self._listening[number] = protocol_factory
        return _Listener(number, lambda: self._listening.pop(number, None))

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect with whoever listens there; raises ConnectionRefusedError where nobody does."""
        accept = self._listening.get(port)
        if accept is None:
            raise ConnectionRefusedError(f"nobody listens at port {port}")
        with self.work.counted():
            server = _Transport(self, accept(), self.work)
        client = _Transport(self, protocol_factory(), None)
        server.peer, client.peer = client, server
        with self.work.counted():
            server.protocol.connection_made(server)
        client.protocol.connection_made(client)
        return client, client.protocol


class _Listener:
    """A server as whoever started it sees it."""

    def __init__(self, port: int, close: Callable[[], object]) -> None:
        self.sockets = [self]
        self.close = close
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port


class _Transport(asyncio.Transport):
    """One end of a connection; ``work`` counts what its protocol computes, if that is a server's."""

    peer: _Transport

    def __init__(self, loop: FleetLoop, protocol: Any, work: SimulatedWork | None) -> None:
        super().__init__()
        self.protocol = protocol
        self._loop = loop
        self._work = work
        self._unread: deque[memoryview] = deque()
        self._num_unread = 0
        self._is_due = self._is_reading_paused = self._is_closing = self._has_paused_writer = False

    def write(self, data: Any) -> None:
        """Hand over bytes; they come when the loop has done what is due now."""
        if self._is_closing or not len(data):
            return
        peer = self.peer
        peer._unread.append(memoryview(data))
        peer._num_unread += len(data)
        if peer._num_unread > _UNREAD_BYTES and not peer._has_paused_writer:
            peer._has_paused_writer = True
            self.protocol.pause_writing()
        peer._soon()

    def close(self) -> None:
        """Close; what was written still comes."""
        self.abort()

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose)
            self._loop.call_soon(self.peer._end)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        """Let what comes wait."""
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        """Take what has come."""
        self._is_reading_paused = False
        self._soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Keep the limits as they are."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return nothing: there is no socket."""
        return default

    def _soon(self) -> None:
        if self._unread and not self._is_due and not self._is_reading_paused:
            self._is_due = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_due = False
        if self._work is None:
            self._read()
            return
        with self._work.counted():
            self._read()

    def _read(self) -> None:
        while self._unread and not self._is_reading_paused and not self._is_closing:
            piece = self._unread[0]
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                buffer = memoryview(self.protocol.get_buffer(-1))
                size = min(len(buffer), len(piece))
                buffer[:size] = piece[:size]
                self._took(size)
                self.protocol.buffer_updated(size)
            else:
                self._took(len(piece))
                self.protocol.data_received(bytes(piece))

    def _took(self, size: int) -> None:
        piece = self._unread.popleft()
        if size < len(piece):
            self._unread.appendleft(piece[size:])
        self._num_unread -= size
        if self._has_paused_writer and self._num_unread <= _UNREAD_BYTES // 4:
            self._has_paused_writer = False
            self._loop.call_soon(self.peer._writable)

    def _writable(self) -> None:
        if self._work is None:
            self.protocol.resume_writing()
            return
        with self._work.counted():
            self.protocol.resume_writing()

    def _end(self) -> None:
        """Lose the connection that the other end has closed, behind what it sent before."""
        if self._is_closing:
            return
        self._is_reading_paused = False
        self._deliver()
        self._is_closing = True
        self._lose()

    def _lose(self) -> None:
        if self.protocol is _NOBODY:
            return
        self._unread.clear()
        # As asyncio's own: without circles both ends go at once, and the collector has nothing to do that is not ours.
        protocol, self.protocol = self.protocol, _NOBODY
        del self.peer
        if self._work is None:
            protocol.connection_lost(None)
            return
        with self._work.counted():
            protocol.connection_lost(None)
