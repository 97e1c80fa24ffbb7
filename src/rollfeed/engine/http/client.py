"""HTTP as this client speaks it: what is sent where, and what a failure means for the caller.

Generation and control have connections of their own, so that an abort never waits for a free one.
Proxy variables of the environment are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from rollfeed.config.api_key import REFUSING_STATUSES, ApiKey
from rollfeed.engine.http.connections import LARGEST_BODY_BYTES, Connections, NotConnectedError
from rollfeed.engine.http.incoming import BrokenConnectionError, HttpReply
from rollfeed.errors import EngineProtocolError, EngineUnavailableError

_LARGEST_CONTROL_BYTES = 1 << 28
_NO_LIMIT = 1 << 30
_LONGEST_MESSAGE = 300


class Failure(StrEnum):
    """Why a try failed."""

    CONNECTION = "connection"
    SERVER = "server"
    """A 5xx status."""
    REFUSED = "refused"
    """Status 429: too much at once."""
    BROKEN = "broken"
    """Not JSON to its end."""
    STALE = "stale"
    """Sampled by older weights."""
    LOST = "lost"
    """The worker was declared dead."""
    AHEAD = "ahead"
    """Sampled by weights that somebody else has published to some of the servers."""
    UNASKED_ABORT = "unasked abort"
    """The server ended the request before its first token, and nobody here had asked for it."""


class TryFailedError(Exception):
    """One try has failed, and the same request may succeed later or elsewhere."""

    def __init__(
        self, failure: Failure, message: str, *, may_run: bool = False, wait_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.may_run = may_run
        """Whether an engine may still be working on it."""
        self.wait_seconds = wait_seconds
        """How long the server asks to wait."""


class ControlReply(NamedTuple):
    """Any HTTP reply to a control request."""

    status: int
    content: bytes | bytearray

    @property
    def error(self) -> str:
        """Its status and what its body says, as one line, where it is not what was asked for."""
        return f"HTTP {self.status}: {error_message(self.content)}"

    def json(self) -> dict[str, Any]:
        """Return the JSON object in it; an empty one where there is none."""
        try:
            value = msgspec.json.decode(self.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


class Http:
    """Two pools of connections; entered with ``async with``, which closes them at its end.

    Every request carries the key. A status that refuses it is an error at once. With ``keeps_reads_open`` GETs of
    control share the connections of generation: who probes a thousand servers makes one each time, not four.
    """

    def __init__(
        self, *, api_key: ApiKey, max_connections: int, control_timeout_seconds: float, keeps_reads_open: bool = False
    ) -> None:
        self._api_key = api_key
        self._max_connections = max_connections
        self._control_timeout_seconds = control_timeout_seconds
        self._keeps_reads_open = keeps_reads_open

    async def __aenter__(self) -> Http:
        self._generation = Connections(limit=self._max_connections, headers=self._api_key.headers)
        # A fresh connection each: one that the server has just closed would make an abort fail.
        self._control = Connections(limit=_NO_LIMIT, headers=self._api_key.headers, keeps_open=False)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._generation.close()
        await self._control.close()

    async def generate(
        self,
        address: str,
        path: str,
        body: bytes,
        *,
        most_bytes: int = LARGEST_BODY_BYTES,
        events: Callable[[bytes], None] | None = None,
        headers: Mapping[str, str] | None = None,
        is_router: bool = False,
    ) -> bytes | bytearray | None:
        """POST a request for tokens and return the body of a reply with status 200; None where it came as events.

        Args:
            address: Of a server, or of a router.
            path: On it.
            body: JSON.
            most_bytes: That the reply may have.
            events: Takes the events of a streamed reply.
            headers: Of this request, for a router.
            is_router: Whether a 5xx status may come from somebody who has only lost sight of the request.

        Raises:
            TryFailedError: If another try may succeed.
            EngineProtocolError: If the server says that the request is wrong.
        """
        asked = self._generation.request(
            "POST", address, path, body, most_bytes=most_bytes, events=events, headers=headers
        )
        del body  # nobody has it while the reply is waited for
        try:
            reply = await asked
        except NotConnectedError as error:
            raise TryFailedError(Failure.CONNECTION, f"{address}: {_told(error)}") from error
        except BrokenConnectionError as error:
            raise TryFailedError(Failure.CONNECTION, f"{address}: {_told(error)}", may_run=True) from error
        if reply.status == 200:
            return reply.content
        raise self._refusal(address, path, reply, is_router=is_router)

    def _refusal(self, address: str, path: str, reply: HttpReply, *, is_router: bool) -> Exception:
        if reply.status in REFUSING_STATUSES:
            return EngineProtocolError(f"{address}{path}: {self._api_key.refusal(reply.status)}")
        message = f"{address}: HTTP {reply.status}: {error_message(self._api_key.hidden(bytes(reply.content or b'')))}"
        if reply.status == 429:
            wait = reply.headers.get("retry-after", "")
            return TryFailedError(Failure.REFUSED, message, wait_seconds=float(wait) if wait.isdecimal() else None)
        if reply.status >= 500:
            # A router may have lost the connection to a worker that goes on.
            return TryFailedError(Failure.SERVER, message, may_run=is_router)
        return EngineProtocolError(message)

    async def control(
        self, method: str, url: str, body: Any = None, *, timeout_seconds: float | None = None
    ) -> ControlReply:
        """Return a reply, whatever its status but those that refuse the key.

        Raises:
            EngineUnavailableError: If there is none in time.
            EngineProtocolError: If the server wants a key, or another one.
        """
        seconds = timeout_seconds if timeout_seconds is not None else self._control_timeout_seconds
        encoded = msgspec.json.encode(body) if body is not None else b""
        parts = urlsplit(url)
        address = f"{parts.scheme}://{parts.netloc}"
        path = url.removeprefix(address) or "/"
        send = self._read if method == "GET" and self._keeps_reads_open else self._control.request
        try:
            async with asyncio.timeout(seconds):
                reply = await send(method, address, path, encoded, most_bytes=_LARGEST_CONTROL_BYTES)
        except TimeoutError:
            raise EngineUnavailableError(f"{url}: no answer within {seconds:g} s") from None
        except ConnectionError as error:
            raise EngineUnavailableError(f"{url}: {_told(error)}") from error
        if reply.status in REFUSING_STATUSES:
            raise EngineProtocolError(f"{url}: {self._api_key.refusal(reply.status)}")
        content = reply.content or b""
        return ControlReply(reply.status, content if reply.status == 200 else self._api_key.hidden(bytes(content)))

    async def _read(self, method: str, address: str, path: str, body: bytes, *, most_bytes: int) -> HttpReply:
        try:
            return await self._generation.request(method, address, path, body, most_bytes=most_bytes)
        except BrokenConnectionError:  # the server may just have closed it
            return await self._control.request(method, address, path, body, most_bytes=most_bytes)

    async def command(self, url: str, body: Any, *, timeout_seconds: float | None = None) -> ControlReply:
        """POST a command and return the reply, which has status 200.

        Raises:
            EngineUnavailableError: If there is no answer in time, or a 5xx status.
            EngineProtocolError: If the server refuses.
        """
        reply = await self.control("POST", url, body, timeout_seconds=timeout_seconds)
        if reply.status != 200:
            kind = EngineUnavailableError if reply.status >= 500 else EngineProtocolError
            refusal = kind(f"{url}: {reply.error}")
            refusal.status = reply.status
            raise refusal
        return reply

    async def ask(
        self, address: str, path: str, body: Any, *, timeout_seconds: float | None = None
    ) -> Mapping[str, Any]:
        """POST a command to a path of a server and return the object of its answer; raises as :meth:`command`."""
        return (await self.command(address + path, body, timeout_seconds=timeout_seconds)).json()


def error_message(content: bytes | bytearray) -> str:
    """Return what a server's error body says, as one line."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = content.decode(errors="replace")
    for _ in range(2):
        if isinstance(value, dict):
            value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), value)
    return " ".join(str(value).split())[:_LONGEST_MESSAGE] or "no message"


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST_MESSAGE] or type(error).__name__
