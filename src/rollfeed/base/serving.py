"""Web applications, served while a block runs, and their metrics as Prometheus reads them.

Every server is held by the same rules: pages of a browser ask nothing, bodies are JSON or bytes by their type, a key is
asked for where there is one, and connections are as many as there are descriptors for. Those that hold none of a whole
request are closed after a while, and at once where somebody else has no room.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rollfeed.errors import ConfigError

PROMETHEUS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SHUTDOWN_SECONDS = 0.5
"""For replies under way."""
_SILENT_SECONDS = 60.0
"""That a connection may have without a whole head of a request, at least; twice that at most."""
_LEAST_BODY_BYTES = 1 << 16
"""Of a body that come in that time, or its connection is closed, too."""
_OWN_DESCRIPTORS = 96
"""At least these are kept for files, and for connections that are to be refused."""
_MOST_WAITING, _MOST_PENDING = 128, 1024
"""Connections taken from the system at once, before any of them is refused, and those that wait in it."""
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 37\r\n\r\nthis server has all its connections.\n"
)
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/healthz", "/readiness", "/liveness", "/metrics"})
"""Answered without a key."""
_BODY_TYPES = re.compile(r"application/(json|[\w.-]+\+json|octet-stream)")
"""Types that a page of a browser cannot send to another address than its own without asking it first."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]|\xed[\xa0-\xbf]"
)
_decoder = msgspec.json.Decoder()
_MOST_DEPTH, _MOST_CONTAINERS, _MOST_QUOTES = 100, 1 << 18, 1 << 22
"""Of JSON in a body; so many containers take a tenth of a second."""
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(code for code in range(256) if code not in _STEPS)
CLOSED_CONNECTIONS = web.AppKey("closed_connections", Counter[str])
"""Where an application counts connections that were closed because they were silent."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a failure is the server's; bytes that are not HTTP are answered 400, and routers probe with such."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_log = logging.getLogger("rollfeed.serve")
_logger = logging.getLogger(__name__)
_logger.addFilter(_is_ours)


@asynccontextmanager
async def serve_application(
    application: web.Application,
    *,
    host: str,
    port: int,
    key: str | None = None,
    descriptors_each: int = 1,
    silent_seconds: float = _SILENT_SECONDS,
) -> AsyncIterator[str]:
    """Serve while the block runs; give the address, for example ``http://127.0.0.1:30000``.

    A client that goes away cancels what it asked for; one that asks nothing, or does not get to the end of a head or a
    body, is closed after a while. Leaving closes all connections.

    Args:
        application: Not served before; it gets :func:`guard` as its first middleware.
        host: Where to listen.
        port: 0 takes a free one.
        key: That requests have to bear, except those for its health and numbers; None where the address is enough.
        descriptors_each: How many a connection may need, with those of what it asks others for.
        silent_seconds: After which connections that bring nothing are closed, at the latest after twice as many.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    application.middlewares.insert(0, guard(host, key))
    runner = web.AppRunner(
        application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS, access_log=None, logger=_logger
    )
    await runner.setup()
    try:
        assert runner.server is not None
        door = _Door(runner.server, application, descriptors_each)
        try:
            listening = await asyncio.get_running_loop().create_server(door, host, port, backlog=door.most_waiting)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        for each in listening.sockets:
            with each.dup() as same:
                same.listen(_MOST_PENDING)  # which the loop takes for the number to be taken at once, too
        closing = asyncio.create_task(door.close_silent_every(silent_seconds), name="silent connections")
        try:
            address = listening.sockets[0].getsockname()
            yield f"http://{f'[{host}]' if ':' in host else host}:{address[1]}"
        finally:
            listening.close()
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
    finally:
        await runner.cleanup()


def guard(host: str, key: str | None = None) -> Middleware:
    """Return the middleware that refuses what no client of ours sends.

    Any page in a browser can send requests to loopback, and to what it believes to be its own host. So a request that
    another page sends is refused, as is a body without a type that such a page could not give it; and on loopback, one
    that names another host.
    """
    on_loopback = is_loopback(host)

    def refusal(request: web.Request) -> tuple[int, str] | None:
        headers = request.headers
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "none")
        is_opened = headers.get("Sec-Fetch-Mode") == "navigate" and request.path == "/"  # links may stand anywhere
        if on_loopback and "Host" in headers and not is_loopback(_name_of(request.host)):
            return 403, f"this server listens on {host}: ask for it by that name, or as localhost"
        if origin is not None and origin != f"{request.scheme}://{request.host}":
            return 403, "pages of other addresses are not answered"
        if site not in ("none", "same-origin") and not is_opened:
            return 403, "pages of other addresses are not answered"
        told = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if request.body_exists and _BODY_TYPES.fullmatch(told) is None:
            return 415, "say that the body is JSON: Content-Type: application/json"
        if key is not None and request.path not in _OPEN_PATHS and not is_key(key_of(request), key):
            return 401, "the key is missing or wrong: send it as Authorization: Bearer"
        return None

    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        refused = refusal(request)
        if refused is None:
            return await handler(request)
        return web.json_response({"error": {"message": refused[1]}}, status=refused[0])

    return guarded


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on an address, as far as its name tells."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name_of(authority: str) -> str:
    """Return the host of ``host:port``, without brackets."""
    name = authority.rpartition(":")[0] if authority[-1:].isdigit() and ":" in authority else authority
    return name.removeprefix("[").removesuffix("]").lower()


def key_of(request: web.Request) -> str:
    """Return the key that a request bears, in either header that clients of chats send; empty where it bears none."""
    told = request.headers.get("Authorization", "")
    return told[7:].strip() if told[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


def is_key(given: str, key: str) -> bool:
    """Whether what a client gave is the key; how long this takes tells nothing of it."""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())


class _Refusing(asyncio.Protocol):
    """Answers a connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_REFUSED)
        transport.close()


class _Door:
    """Lets connections in, as many as there may be, and closes those that bring no request."""

    def __init__(self, server: web.Server, application: web.Application, descriptors_each: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = 1 << 20 if limit == resource.RLIM_INFINITY else limit
        kept = max(_OWN_DESCRIPTORS, min(limit // 4, 4 * _MOST_WAITING))
        # So many are taken, made and closed at a time, while as many are there as there may be.
        self.most_waiting = min(_MOST_WAITING, kept // 4)
        self._most = max(1, (limit - kept) // descriptors_each)
        self._server = server
        self._application = application
        self._has_told = False
        """That it is full, since the last look at who is silent."""
        self._brought_before: dict[Any, tuple[int, int]] = {}
        """By connections that were not being answered at the last look."""

    def __call__(self) -> asyncio.BaseProtocol:
        """Return what speaks with a new connection; the oldest that is not being answered makes room for it."""
        if len(self._server._connections) < self._most:
            return self._server()
        if not self._has_told:
            self._has_told = True
            _log.warning("all %d connections are taken: those without a whole request are closed", self._most)
        for connection in self._server._connections:
            if connection.transport is not None and not _is_answered(connection):
                self._close(connection)
                return self._server()
        return _Refusing()

    async def close_silent_every(self, seconds: float) -> None:
        """Close, whenever so many seconds have passed, what has brought nothing in them."""
        while True:
            await asyncio.sleep(seconds)
            self.close_silent()

    def close_silent(self) -> None:
        """Close what has brought nothing since the last call."""
        self._has_told = False
        brought = {each: _brought(each) for each in self._server.connections if not _is_answered(each)}
        for connection, (num_requests, num_bytes) in brought.items():
            before = self._brought_before.get(connection)
            if before is None or before[0] != num_requests or num_bytes - before[1] >= _LEAST_BODY_BYTES:
                continue  # it was not there, or has asked in between
            self._close(connection)
        self._brought_before = brought

    def _close(self, connection: Any) -> None:
        connection.force_close()
        if CLOSED_CONNECTIONS in self._application:
            self._application[CLOSED_CONNECTIONS]["silent_connections"] += 1


def _is_answered(connection: Any) -> bool:
    """Whether there is a whole request, or one whose body is left for later by whoever answers it."""
    request = connection._current_request
    return request is not None and (request.content.is_eof() or connection._reading_paused)


def _brought(connection: Any) -> tuple[int, int]:
    """Return the number of requests of a connection, and the bytes of the present one's body so far."""
    request = connection._current_request
    return connection._request_count, 0 if request is None else request.content.total_bytes


async def decoded_body(body: bytes, *, large_bytes: int) -> Any:
    """Return the JSON value of a body; one beyond ``large_bytes`` is decoded in a thread, so that the loop goes on.

    What the loop may have to wait for all the same is bounded by how many lists and objects there may be.

    Raises:
        ValueError: If it is none, or deeper or of more lists and objects than any request is; the message says why.
    """

    def decode() -> Any:
        check_structure(body)
        return _decoder.decode(body)

    try:
        return await asyncio.to_thread(decode) if len(body) > large_bytes else decode()
    except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        cause = "half of a surrogate pair in a text" if _LONE_SURROGATE.search(body) else error
        raise ValueError(f"the body is not JSON: {cause}") from None


def check_structure(body: bytes) -> None:
    """Raise ValueError for JSON that is deeper, or has more lists and objects, than any request; nothing is decoded."""
    if sum(map(body.count, (b"[", b"{"))) <= _MOST_DEPTH:
        return
    if body.count(b'"') > _MOST_QUOTES:
        raise ValueError(f"it has more than {_MOST_QUOTES} quotes")
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = outside.translate(None, _NO_BRACKETS)
    if len(brackets) > 2 * _MOST_CONTAINERS:
        raise ValueError(f"it has more than {_MOST_CONTAINERS} lists and objects")
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > _MOST_DEPTH:
        raise ValueError(f"it is more than {_MOST_DEPTH} lists and objects deep")


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error that says why an address cannot be listened on."""
    told = f"port = {port}: cannot listen on {host}:{port} ({error.strerror or error})"
    return ConfigError(f"{told}; choose another port, 0 for a free one")


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def prometheus_text(families: Iterable[Metric]) -> bytes:
    """Return metrics as text of :data:`PROMETHEUS_TYPE`."""
    return generate_latest(_Families(families))
