"""The connections that requests for tokens go through: HTTP/1.1 on a pool of our own, read by httptools.

A general client costs several times the processor time for a reply of a thousand tokens; bench/http_pool.json has the
figures.

Invariant: a connection is idle, lent to one request, or closed; one that was not read to the end of its reply is
closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from rollfeed.engine.http.body_room import Body, BodyRoom
from rollfeed.engine.http.incoming import BrokenConnectionError, HttpReply, Incoming

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0  # below the 5 s after which uvicorn, SGLang's server, closes an idle connection
_END_SECONDS = 0.2
"""For the end of a stream behind its last event, after which the connection can be used again."""
_PIECE_BYTES = 1 << 16
_UNREAD_BODIES_BYTES = 1 << 24  # about what a processor's cache holds: bodies are decoded from there
LARGEST_BODY_BYTES = 1 << 31


class NotConnectedError(ConnectionError):
    """There is no connection; nothing has been sent."""


class Connections:
    """A bounded pool of connections to any number of addresses. Belongs to one event loop."""

    def __init__(self, *, limit: int, headers: Mapping[str, str], keeps_open: bool = True) -> None:
        self._limit = limit
        self._headers = headers if keeps_open else {**headers, "Connection": "close"}
        """Of every request, besides those that HTTP needs."""
        self._keeps_open = keeps_open
        self._places = asyncio.Semaphore(limit)
        self._num_lent = 0
        self._idle: dict[str, list[_Connection]] = {}
        """By address; none of them is empty."""
        self._num_idle = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._targets: dict[str, _Target] = {}
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        """Where all connections receive; it is parsed at once."""
        self._room = BodyRoom(limit_bytes=_UNREAD_BODIES_BYTES)

    @property
    def is_empty(self) -> bool:
        """Whether no connection is open, idle or lent."""
        return not self._num_lent and not any(each.is_usable for idle in self._idle.values() for each in idle)

    async def request(
        self,
        method: str,
        address: str,
        path: str,
        body: bytes,
        *,
        most_bytes: int = LARGEST_BODY_BYTES,
        events: Callable[[bytes], None] | None = None,
        pieces: Callable[[bytes], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """Send a request and return the reply, whatever its status.

        Args:
            method: Of HTTP.
            address: With a path in front of all others, where the server is behind one.
            path: On it, with a query.
            body: JSON, or nothing.
            most_bytes: That the body of the reply may have.
            events: Called with the data of each event, where the reply is a stream of them; what it raises is raised
                here.
            pieces: In its place: called with the bytes of such a stream, as they come.
            headers: Of this request, beside those of all.

        Raises:
            NotConnectedError: If no connection can be made.
            BrokenConnectionError: If it ends before the reply does, or the reply is no HTTP or too long.
        """
        async with self._places:
            self._num_lent += 1
            connection = None
            try:
                connection = self._take_idle(address)
                if connection is None:
                    self._make_room()
                    connection = await self._connect(address)
                head = self._target(address).head(method, path, len(body), headers)
                incoming = Incoming(most_bytes=most_bytes, events=events, pieces=pieces)
                answer = connection.send(head + body, incoming)
                del body  # the reply may take minutes, and thousands wait
                reply = await connection.answered(answer, incoming)
            except BaseException:
                if connection is not None:
                    connection.abort()
                raise
            finally:
                self._num_lent -= 1
            self._keep(address, connection)
            return reply

    async def close(self) -> None:
        """Close the idle connections; lent ones end with their requests."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        closing = [connection for idle in self._idle.values() for connection in idle]
        self._idle.clear()
        self._num_idle = 0
        await asyncio.gather(*(connection.close() for connection in closing))

    def _take_idle(self, address: str) -> _Connection | None:
        while address in self._idle:
            connection = self._pop_idle(address)
            if connection.is_usable:
                return connection
        return None

    def _pop_idle(self, address: str, place: int = -1) -> _Connection:
        idle = self._idle[address]
        connection = idle.pop(place)
        self._num_idle -= 1
        if not idle:
            del self._idle[address]
        return connection

    def _make_room(self) -> None:
        """Close an idle connection to some other address when there is one too many with the next."""
        if self._num_idle and self._num_lent + self._num_idle > self._limit:
            self._pop_idle(next(iter(self._idle)), 0).abort()

    def _keep(self, address: str, connection: _Connection) -> None:
        if not (self._keeps_open and connection.is_usable):
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(address, []).append(connection)
        self._num_idle += 1
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long; go on as long as there is something idle."""
        oldest, self._sweeper = asyncio.get_running_loop().time() - _IDLE_SECONDS, None
        idle, self._idle = self._idle, {}
        for address, connections in idle.items():
            for connection in connections:
                if connection.idle_since <= oldest:
                    connection.abort()
                elif connection.is_usable:
                    self._idle.setdefault(address, []).append(connection)
        self._num_idle = sum(map(len, self._idle.values()))
        if self._idle:
            self._sweeper = asyncio.get_running_loop().call_later(_IDLE_SECONDS / 2, self._sweep)

    async def _connect(self, address: str) -> _Connection:
        target = self._target(address)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    partial(_Connection, self._buffer, self._room), target.host, target.port, ssl=target.context
                )
        except TimeoutError:
            raise NotConnectedError(f"no connection within {_CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise NotConnectedError(str(error)) from error
        return connection

    def _target(self, address: str) -> _Target:
        target = self._targets.get(address)
        if target is None:
            target = self._targets[address] = _Target.of(address, self._headers)
        return target


class _Target(NamedTuple):
    """An address, and the parts of a request that are the same for all of them."""

    host: str
    port: int
    context: ssl.SSLContext | None
    prefix: str
    headers: str

    @classmethod
    def of(cls, address: str, headers: Mapping[str, str]) -> _Target:
        parts = urlsplit(address)
        context = ssl.create_default_context() if parts.scheme == "https" else None
        given = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "application/json", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return cls(parts.hostname or "", parts.port or (443 if context else 80), context, parts.path, lines)

    def head(self, method: str, path: str, num_bytes: int, headers: Mapping[str, str] | None) -> bytes:
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items()) if headers else ""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.headers}{own}Content-Length: {num_bytes}\r\n\r\n"
        return head.encode("latin-1")


class _Connection(asyncio.BufferedProtocol):
    """One request and its reply at a time."""

    def __init__(self, buffer: memoryview, room: BodyRoom) -> None:
        self._buffer = buffer
        self._room = room
        self.idle_since = 0.0
        self._is_lost = False
        self._lost: asyncio.Event | None = None
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpReply] | None = None
        self._incoming: Incoming | None = None
        self._keeps_open = True

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return self._keeps_open and self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, incoming: Incoming) -> asyncio.Future[HttpReply]:
        """Send a request and return what :meth:`answered` awaits."""
        if self._transport is None or not self.is_usable:
            raise BrokenConnectionError("connection lost before the request was sent")
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._incoming = incoming
        self._transport.write(request)
        return answer

    async def answered(self, answer: asyncio.Future[HttpReply], incoming: Incoming) -> HttpReply:
        """Return the reply; to be aborted when this is cancelled or raises."""
        try:
            return await answer
        finally:
            self._answer = self._incoming = None
            incoming.close()

    def abort(self) -> None:
        """Close at once."""
        self._keeps_open = False
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close at once, and return when it is."""
        self.abort()
        if not self._is_lost:
            self._lost = asyncio.Event()
            await self._lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeps_open, self._is_lost = False, True
        if self._lost is not None:
            self._lost.set()
        if self._answer is None or self._answer.done() or self._incoming is None:
            return
        if exc is None and self._incoming.end_with_connection():
            self._finish(self._incoming)
        else:
            self._fail(BrokenConnectionError(f"connection lost before the end of the reply: {exc}"))

    def eof_received(self) -> None:
        return None  # and let the transport close

    def get_buffer(self, _sizehint: int) -> memoryview:
        incoming = self._incoming
        return self._buffer if incoming is None or incoming.body is None else incoming.rest()

    def buffer_updated(self, nbytes: int) -> None:
        incoming = self._incoming
        if incoming is None or self._answer is None or self._answer.done():
            self.abort()  # nobody asked
            return
        try:
            if incoming.body is not None:
                incoming.fill(nbytes)
            else:
                incoming.feed(self._buffer[:nbytes])
        except Exception as error:
            self._fail(error)
            return
        if incoming.is_whole:
            self._keeps_open = incoming.keeps_open
            self._finish(incoming)
        elif incoming.has_ended:
            asyncio.get_running_loop().call_later(_END_SECONDS, self._end_of_stream, incoming)
        elif incoming.size and incoming.body is None and self._transport is not None:
            self._room.take(incoming.size, partial(self._receive, incoming))
            if incoming.body is None:
                self._transport.pause_reading()

    def _receive(self, incoming: Incoming, body: Body) -> None:
        """Go on with a large body for which there is room."""
        if self._incoming is incoming and self._transport is not None and not self._transport.is_closing():
            incoming.start(body)
            self._transport.resume_reading()

    def _end_of_stream(self, incoming: Incoming) -> None:
        """Wait no longer for the end of a stream whose last event has come."""
        if self._incoming is incoming and self._answer is not None and not self._answer.done():
            self._keeps_open = False
            self._finish(incoming)

    def _finish(self, incoming: Incoming) -> None:
        assert self._answer is not None
        try:
            self._answer.set_result(incoming.reply())
        except BrokenConnectionError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        assert self._answer is not None
        self._answer.set_exception(error)
        self.abort()
