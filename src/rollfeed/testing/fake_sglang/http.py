"""A bare HTTP/1.1 server on asyncio protocols: as little work a request as can be.

A handler is called with each request and may answer at once or later; nothing is a task.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qs, urlsplit

import httptools
import msgspec

from rollfeed.base.serving import cannot_listen
from rollfeed.testing.fake_sglang.settings import ServerFault
from rollfeed.testing.fake_sglang.tokens import Part
from rollfeed.testing.held_port import hold_port

_OPEN_PATHS = ("/health", "/metrics")
_BACKLOG = 4096
_CHUNK_BYTES = 1 << 16
"""What is handed to a socket at once, so that slow readers of large replies cost no memory."""
_READING_SECONDS = 0.05
_LINGER_RESET = struct.pack("ii", 1, 0)
JSON_TYPE = "application/json"


@dataclass(slots=True)
class HttpRequest:
    """A request as a client sent it."""

    method: str = ""
    target: str = ""
    """Path and query as sent."""
    body: bytes = b""
    authorization: str | None = None
    """The header field of this name."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def query(self, name: str) -> str | None:
        """Return the first value of a name in the query."""
        values = parse_qs(urlsplit(self.target).query).get(name)
        return values[0] if values else None


class Exchange:
    """One request, and the way to answer it; answering a client that has left does nothing."""

    def __init__(self, connection: _ServerConnection, request: HttpRequest) -> None:
        self.request = request
        self.on_lost: Callable[[], object] | None = None
        """Called when the client leaves before the answer."""
        self.fault: ServerFault | None = None
        """The fault that the answer has."""
        self._connection = connection
        self._is_open = True

    def respond(self, parts: Sequence[Part] = (), *, status: int = 200, content_type: str | None = JSON_TYPE) -> None:
        """Answer with a body."""
        head = _head(status, content_type, f"content-length: {sum(map(len, parts))}")
        self._end([head, *parts])

    def respond_json(self, content: Any, *, status: int = 200) -> None:
        """Answer with a JSON value."""
        self.respond([msgspec.json.encode(content)], status=status)

    def refused(self, api_key: str | None) -> bool:
        """Answer 401 where the key is missing or another one, and tell whether that was so; health is for everybody."""
        request = self.request
        if api_key is None or request.path.startswith(_OPEN_PATHS) or request.authorization == f"Bearer {api_key}":
            return False
        self.respond_json({"error": "Unauthorized"}, status=401)
        return True

    def start_stream(self, *, status: int = 200, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """Begin an answer of unknown length."""
        if self._is_open:
            self._connection.send([_head(status, content_type, "transfer-encoding: chunked")])

    def send(self, parts: Sequence[Part]) -> None:
        """Send a piece of a stream."""
        if self._is_open:
            self._connection.send([b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n"])

    def end_stream(self) -> None:
        self._end([b"0\r\n\r\n"])

    def reset(self, parts: Sequence[Part] = (), *, fraction: float = 0.0) -> None:
        """Send the beginning of an answer and reset the connection."""
        if self._is_open and fraction > 0.0:
            body = b"".join(parts)
            head = _head(200, JSON_TYPE, f"content-length: {len(body)}")
            self._connection.send([head, body[: int(len(body) * fraction)]])
            # A reset takes away what the client has not read yet.
            asyncio.get_running_loop().call_later(_READING_SECONDS, self.drop)
        else:
            self.drop()

    def respond_raw(self, parts: Sequence[Part]) -> None:
        """Answer with these bytes, head and all."""
        self._end(parts)

    def drop(self) -> None:
        """Reset the connection, with no answer or after the beginning of one."""
        self._is_open, self.on_lost = False, None
        self._connection.drop()

    def lost(self) -> None:
        """Note that the client has left."""
        if self._is_open:
            self._is_open = False
            on_lost, self.on_lost = self.on_lost, None
            if on_lost is not None:
                on_lost()

    def _end(self, parts: Sequence[Part]) -> None:
        if self._is_open:
            self._is_open, self.on_lost = False, None
            self._connection.send(parts)
            self._connection.answered()


Handler: TypeAlias = Callable[[Exchange], object]


class HttpServer:
    """Listens on one port and hands every request to a handler."""

    def __init__(self, handler: Handler, *, host: str, port: int) -> None:
        self.handler = handler
        self.connections: set[_ServerConnection] = set()
        self.most_connections = 0
        self._host = host
        self._port = port
        self._held: socket.socket | None = None
        """Keeps the port between ``stop`` and ``start``."""
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """The address it listens on, or did: ``http://host:port``."""
        return f"http://{self._host}:{self._port}"

    @property
    def is_listening(self) -> bool:
        """Whether it takes connections."""
        return self._server is not None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port is taken."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _ServerConnection(self), self._host, self._port, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            raise cannot_listen(self._host, self._port, error) from error
        self._port = int(self._server.sockets[0].getsockname()[1])
        self._let_go()

    def stop(self) -> None:
        """Refuse new connections and drop those there are; ``start`` listens on the same port again."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._held = hold_port(self._host, self._port)
        for connection in list(self.connections):
            connection.end()

    def close(self) -> None:
        """Stop, and leave the port to others."""
        self.stop()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class _ServerConnection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._request = HttpRequest()
        """The one that is being received."""
        self._body: list[bytes] = []
        self._waiting: deque[HttpRequest] = deque()
        """Received, behind the one that is being answered."""
        self._outgoing: deque[memoryview] = deque()
        self._is_writable = True
        self._exchange: Exchange | None = None
        self._is_handling = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_CHUNK_BYTES // 2)
        server = self._server
        if not server.is_listening:  # accepted as it stopped
            self.drop()
            return
        server.connections.add(self)
        server.most_connections = max(server.most_connections, len(server.connections))

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._outgoing.clear()
        if self._exchange is not None:
            self._exchange.lost()
        del self._parser  # which refers to this

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.send([_head(400, None, "content-length: 0")])
            self._transport.close()
            return
        self._handle()

    # What the parser finds.

    def on_url(self, url: bytes) -> None:
        self._request.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"authorization":
            self._request.authorization = value.decode("latin-1")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.send([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        request, self._request = self._request, HttpRequest()
        request.method = self._parser.get_method().decode()
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._waiting.append(request)

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._flush()

    def send(self, parts: Sequence[Part]) -> None:
        self._outgoing.extend(memoryview(part) for part in parts)
        self._flush()

    def answered(self) -> None:
        self._exchange = None
        self._handle()

    def end(self) -> None:
        if self._exchange is None:
            self._transport.close()
        else:
            self.drop()

    def drop(self) -> None:
        connection: socket.socket | None = self._transport.get_extra_info("socket")
        if connection is not None and not self._transport.is_closing():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self._transport.abort()

    def _flush(self) -> None:
        while self._outgoing and self._is_writable and not self._transport.is_closing():
            chunk: list[memoryview] = []
            size = 0
            while self._outgoing and size < _CHUNK_BYTES:
                part = self._outgoing.popleft()
                if size + len(part) > _CHUNK_BYTES:
                    cut = _CHUNK_BYTES - size
                    self._outgoing.appendleft(part[cut:])
                    part = part[:cut]
                chunk.append(part)
                size += len(part)
            self._transport.write(chunk[0] if len(chunk) == 1 else b"".join(chunk))

    def _handle(self) -> None:
        if self._is_handling:
            return
        self._is_handling = True
        while self._waiting and self._exchange is None and not self._transport.is_closing():
            self._exchange = Exchange(self, self._waiting.popleft())
            self._server.handler(self._exchange)
        self._is_handling = False


def _head(status: int, content_type: str | None, length: str) -> bytes:
    kind = f"content-type: {content_type}\r\n" if content_type else ""
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{kind}{length}\r\n\r\n".encode()
