"""HTTP to one server: streamed or whole replies, and control requests on connections of their own.

Proxy variables of the environment are ignored, redirects are not followed (a key would go along), and
every body is read to its end or its connection closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from rollfeed.config.api_key import REFUSING_STATUSES, ApiKey
from rollfeed.engine.http import ControlReply, Failure, TryFailedError, error_message
from rollfeed.errors import EngineProtocolError, EngineUnavailableError

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0  # below the 5 s after which uvicorn closes an idle connection
_END_SECONDS = 0.2
_LONGEST_ERROR_BYTES = 1 << 16
_LONGEST_EVENT_BYTES = 1 << 28
_JSON_HEADERS = {"Content-Type": "application/json"}
_LAST_EVENT = b"[DONE]"


class Transport:
    """Connections to one server; entered with ``async with``, which closes them at its end."""

    def __init__(self, base_url: str, *, api_key: ApiKey, max_connections: int, control_timeout_seconds: float) -> None:
        self.base_url = base_url
        self._api_key = api_key
        self._max_connections = max_connections
        self._control_timeout_seconds = control_timeout_seconds

    async def __aenter__(self) -> Transport:
        self._generation = self._session(
            aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_IDLE_SECONDS)
        )
        # A fresh connection each: one that the server has just closed would make a command fail.
        self._control = self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._generation.close()
        await self._control.close()

    async def receive(self, path: str, body: bytes, take: Callable[[bytes], None]) -> None:
        """POST a request for tokens and hand on each piece of the reply: its events, or all of it in one.

        Leaving it early, however that happens, closes the connection.

        Raises:
            TryFailedError: If another try may succeed.
            EngineProtocolError: If the server says that the request is wrong.
        """
        try:
            async with self._generation.post(
                self.base_url + path, data=body, headers=_JSON_HEADERS, allow_redirects=False
            ) as response:
                try:
                    await self._read(response, take)
                finally:
                    if not response.content.at_eof():
                        response.close()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise TryFailedError(Failure.CONNECTION, self._told(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TryFailedError(Failure.CONNECTION, self._told(error), may_run=True) from error

    async def control(
        self, method: str, path: str, body: Any = None, *, timeout_seconds: float | None = None
    ) -> ControlReply:
        """Return a reply, whatever its status but those that refuse the key.

        Raises:
            EngineUnavailableError: If there is none in time.
            EngineProtocolError: If the server wants a key, or another one.
        """
        seconds = timeout_seconds if timeout_seconds is not None else self._control_timeout_seconds
        encoded = None if body is None else msgspec.json.encode(body)
        try:
            async with self._control.request(
                method,
                self.base_url + path,
                data=encoded,
                headers=None if encoded is None else _JSON_HEADERS,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as response:
                status, content = response.status, await response.read()
        except TimeoutError:
            raise EngineUnavailableError(f"{self.base_url}{path}: no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailableError(self._told(error)) from error
        if status in REFUSING_STATUSES:
            raise EngineProtocolError(f"{self.base_url}{path}: {self._api_key.refusal(status)}")
        return ControlReply(status, content if status == 200 else self._api_key.hidden(content))

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._api_key.headers,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )

    async def _read(self, response: aiohttp.ClientResponse, take: Callable[[bytes], None]) -> None:
        if response.status != 200:
            raise await self._refusal(response)
        if response.content_type != "text/event-stream":
            take(await response.read())
            return
        events = EventSplitter()
        async for piece in response.content.iter_any():
            for content in events.feed(piece):
                if content == _LAST_EVENT:
                    await _read_end(response)
                    return
                take(content)
        raise TryFailedError(Failure.CONNECTION, f"{self.base_url}: the stream ended before its last event")

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        if response.status in REFUSING_STATUSES:
            return EngineProtocolError(f"{response.url}: {self._api_key.refusal(response.status)}")
        content = self._api_key.hidden(await response.content.read(_LONGEST_ERROR_BYTES))
        message = f"{response.url}: HTTP {response.status}: {error_message(content)}"
        if response.status == 429:
            wait = response.headers.get("retry-after", "")
            return TryFailedError(Failure.REFUSED, message, wait_seconds=float(wait) if wait.isdecimal() else None)
        if response.status >= 500:
            return TryFailedError(Failure.SERVER, message)
        return EngineProtocolError(message)

    def _told(self, error: Exception) -> str:
        return f"{self.base_url}: {' '.join(str(error).split())[:300] or type(error).__name__}"


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Wait a moment for the end of the body, after which the connection can be used again."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await response.content.readany()


class EventSplitter:
    """Finds the ``data:`` of server-sent events in pieces of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield what each line that is now complete carries; other lines carry nothing.

        Raises:
            TryFailedError: If a line has no end.
        """
        self._rest += piece
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._rest[start:end]).rstrip(b"\r")
            start = self._searched = end + 1
            if line.startswith(b"data:"):
                yield line[5:].strip()
        del self._rest[:start]
        self._searched = len(self._rest)
        if self._searched > _LONGEST_EVENT_BYTES:
            raise TryFailedError(Failure.BROKEN, "an event has no end")
