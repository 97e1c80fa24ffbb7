"""The connections that requests for tokens go through: HTTP/1.1 POST and nothing else.

A reply is received into one buffer of its announced size and handed on as it is. A general client
costs about half a millisecond of processor time more for a reply of a thousand tokens, which is as
much as all the rest that is done for it.

Invariant: a connection is idle, lent to one request, or closed; one that was not read to the end of
its reply is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from rollfeed.engine.http.body_room import Body, BodyRoom

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0  # below the 5 s after which uvicorn, SGLang's server, closes an idle connection
_HEAD_BYTES = 1 << 16  # and as much of the body as comes with it: often all of it, which saves a read
_LONGEST_HEAD_BYTES = 1 << 16
_PIECE_BYTES = 1 << 16
_LARGEST_BODY_BYTES = 1 << 31
_UNREAD_BODIES_BYTES = 1 << 24  # about what a processor's cache holds: bodies are decoded from there


class NotConnectedError(ConnectionError):
    """There is no connection; nothing has been sent."""


class BrokenConnectionError(ConnectionError):
    """The connection ended, or made no sense, before the reply was whole."""


class HttpReply(NamedTuple):
    """A whole reply."""

    status: int
    headers: dict[str, str]
    """By lower-case name."""
    content: bytes | bytearray


class Connections:
    """A bounded pool of connections to any number of addresses. Belongs to one event loop."""

    def __init__(self, *, limit: int, headers: Mapping[str, str]) -> None:
        self._limit = limit
        self._headers = headers
        """Of every request, besides those that HTTP needs."""
        self._num_open = 0
        self._idle: dict[str, list[_Connection]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self._heads: dict[str, tuple[str, int, ssl.SSLContext | None, str]] = {}
        self._head_buffer = bytearray(_HEAD_BYTES)
        """Where all connections receive the beginning of a reply; what is not whole then is copied from it at once."""
        self._room = BodyRoom(limit_bytes=_UNREAD_BODIES_BYTES)

    @property
    def is_empty(self) -> bool:
        """Whether no connection is open, idle or lent."""
        return not self._num_open and not any(each.is_usable for idle in self._idle.values() for each in idle)

    async def post(self, address: str, path: str, body: bytes) -> HttpReply:
        """Send JSON and return the reply, whatever its status.

        Raises:
            NotConnectedError: If no connection can be made.
            BrokenConnectionError: If it ends before the reply does.
        """
        await self._take_place()
        connection = None
        try:
            connection = self._take_idle(address)
            if connection is None:
                self._make_room()
                connection = await self._connect(address)
            reply = await connection.ask(self._head(address, path, len(body)) + body)
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        else:
            self._keep(address, connection)
        finally:
            self._give_place()
        return reply

    async def close(self) -> None:
        """Close the idle connections; lent ones end with their requests."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        closing = [connection for idle in self._idle.values() for connection in idle]
        self._idle.clear()
        for connection in closing:
            connection.abort()
        await asyncio.gather(*(connection.closed.wait() for connection in closing))

    async def _take_place(self) -> None:
        if self._num_open < self._limit and not self._waiters:
            self._num_open += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                self._give_place()
            raise

    def _give_place(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._num_open -= 1

    def _take_idle(self, address: str) -> _Connection | None:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None

    def _make_room(self) -> None:
        """Close an idle connection to some other address when there is one too many with the next."""
        num_idle = sum(map(len, self._idle.values()))
        if self._num_open + num_idle > self._limit:
            idle = next(idle for idle in self._idle.values() if idle)
            idle.pop(0).abort()

    def _keep(self, address: str, connection: _Connection) -> None:
        if not connection.is_usable:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(address, []).append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long; go on as long as there is something idle."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - _IDLE_SECONDS
        for address, idle in list(self._idle.items()):
            for connection in idle:
                if connection.idle_since <= oldest:
                    connection.abort()
            self._idle[address] = [connection for connection in idle if connection.is_usable]
            if not self._idle[address]:
                del self._idle[address]
        self._sweeper = loop.call_later(_IDLE_SECONDS / 2, self._sweep) if self._idle else None

    async def _connect(self, address: str) -> _Connection:
        host, port, context, _ = self._target(address)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    partial(_Connection, self._head_buffer, self._room), host, port, ssl=context
                )
        except TimeoutError:
            raise NotConnectedError(f"no connection within {_CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise NotConnectedError(str(error)) from error
        return connection

    def _head(self, address: str, path: str, num_bytes: int) -> bytes:
        fixed = self._target(address)[3]
        return f"POST {path} HTTP/1.1\r\n{fixed}Content-Length: {num_bytes}\r\n\r\n".encode("latin-1")

    def _target(self, address: str) -> tuple[str, int, ssl.SSLContext | None, str]:
        target = self._heads.get(address)
        if target is None:
            parts = urlsplit(address)
            context = ssl.create_default_context() if parts.scheme == "https" else None
            given = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "application/json"}
            headers = "".join(f"{name}: {value}\r\n" for name, value in {**given, **self._headers}.items())
            port = parts.port or (80 if context is None else 443)
            target = self._heads[address] = (parts.hostname or "", port, context, headers)
        return target


class _Connection(asyncio.BufferedProtocol):
    """One request and its reply at a time."""

    def __init__(self, head_buffer: bytearray, room: BodyRoom) -> None:
        self._head_buffer = head_buffer
        self._room = room
        self.idle_since = 0.0
        self.closed = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpReply] | None = None
        self._keeps_open = True
        self._reset()

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return self._keeps_open and self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> HttpReply:
        """Send a request and return its reply; to be aborted when this is cancelled or raises."""
        if self._transport is None or not self.is_usable:
            raise BrokenConnectionError("connection lost before the request was sent")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def abort(self) -> None:
        """Close at once."""
        self._keeps_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeps_open = False
        self.closed.set()
        if self._answer is None or self._answer.done():
            return
        if exc is None and self._status and self._length is None and not self._is_chunked:
            self._end(self._body)  # a body without a length ends with its connection
            return
        self._answer.set_exception(BrokenConnectionError(f"connection lost before the end of the reply: {exc}"))

    def eof_received(self) -> None:
        return None  # and let the transport close

    def get_buffer(self, _sizehint: int) -> memoryview:
        if self._length is not None:
            return memoryview(self._body)[self._filled :]
        if not self._status and len(self._piece) == self._filled:
            self._piece += bytes(_HEAD_BYTES)
        return memoryview(self._piece)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked
            return
        try:
            self._received(nbytes)
        except (ValueError, IndexError) as error:
            self._answer.set_exception(BrokenConnectionError(f"not HTTP: {error}"))
            self.abort()

    def _reset(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._length: int | None = None
        self._is_chunked = False
        self._piece = self._head_buffer
        self._filled = 0
        self._body = bytearray()
        self._chunks = bytearray()

    def _received(self, num_bytes: int) -> None:
        if self._length is not None:
            self._filled += num_bytes
            if self._filled == self._length:
                self._end(self._body)
        elif self._status:
            self._more(bytes(memoryview(self._piece)[:num_bytes]))
        else:
            self._filled += num_bytes
            self._read_head()

    def _read_head(self) -> None:
        end = self._piece.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled > _LONGEST_HEAD_BYTES:
                raise ValueError("the head is too long")
            if self._piece is self._head_buffer:
                self._piece = self._piece[: self._filled] + bytes(_HEAD_BYTES)
            return
        rest = bytes(memoryview(self._piece)[end + 4 : self._filled])
        status_line, *lines = self._piece[:end].decode("latin-1").split("\r\n")
        version, status = status_line.split(" ", 2)[:2]
        if version not in ("HTTP/1.1", "HTTP/1.0") or len(status) != 3:
            raise ValueError(status_line[:80])
        if status.startswith("1"):  # provisional: the real one follows
            self._piece[: len(rest)] = rest
            self._filled = len(rest)
            self._read_head()
            return
        self._status = int(status)
        fields = (line.partition(":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        connection = self._headers.get("connection", "").lower()
        self._keeps_open = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
        self._start_body(rest)

    def _start_body(self, rest: bytes) -> None:
        self._is_chunked = "chunked" in self._headers.get("transfer-encoding", "").lower()
        length = self._headers.get("content-length")
        if self._status in (204, 304):
            length = "0"
        if self._is_chunked or length is None:
            self._keeps_open = self._keeps_open and self._is_chunked
            self._piece, self._filled = bytearray(_PIECE_BYTES), 0
            self._more(rest)
            return
        size = int(length)
        if not 0 <= size <= _LARGEST_BODY_BYTES or len(rest) > size:
            raise ValueError(f"{len(rest)} bytes of {size}")
        self._length = size
        if len(rest) == size:
            self._end(rest)
            return
        self._body = bytearray()
        self._room.take(size, partial(self._receive, rest))
        if not self._body and self._transport is not None:
            self._transport.pause_reading()

    def _receive(self, rest: bytes, body: Body) -> None:
        """Go on with a body for which there is room."""
        if self._transport is None or self._transport.is_closing():
            return  # nobody waits for it any more
        body[: len(rest)] = rest
        self._body, self._filled = body, len(rest)
        self._transport.resume_reading()

    def _more(self, piece: bytes) -> None:
        if not self._is_chunked:
            self._body += piece
            return
        self._chunks += piece
        position = 0
        while (line_end := self._chunks.find(b"\r\n", position)) >= 0:
            size = int(self._chunks[position:line_end].split(b";")[0], 16)
            if not 0 <= size <= _LARGEST_BODY_BYTES - len(self._body):
                raise ValueError(f"a chunk of {size} bytes")
            chunk_end = line_end + 2 + size
            if len(self._chunks) < chunk_end + 2:
                break
            if size == 0:
                # Trailers, which nobody here reads, would be taken for the next reply.
                self._keeps_open = self._keeps_open and self._chunks[chunk_end:] == b"\r\n"
                self._end(self._body)
                return
            self._body += self._chunks[line_end + 2 : chunk_end]
            position = chunk_end + 2
        del self._chunks[:position]

    def _end(self, content: bytes | bytearray) -> None:
        assert self._answer is not None
        self._answer.set_result(HttpReply(self._status, self._headers, content))
        self._reset()
