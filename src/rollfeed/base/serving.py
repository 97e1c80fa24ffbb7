"""Web applications, served while a block runs, and their metrics as Prometheus reads them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rollfeed.errors import ConfigError

PROMETHEUS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SHUTDOWN_SECONDS = 0.5
"""For replies under way."""
_SILENT_SECONDS = 60.0
"""That a connection may have without a whole head of a request, at least; twice that at most."""
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]|\xed[\xa0-\xbf]"
)
_decoder = msgspec.json.Decoder()
CLOSED_CONNECTIONS = web.AppKey("closed_connections", Counter[str])
"""Where an application counts connections that were closed because they were silent."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a failure is the server's; bytes that are not HTTP are answered 400, and routers probe with such."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_logger = logging.getLogger(__name__)
_logger.addFilter(_is_ours)


@asynccontextmanager
async def serve_application(
    application: web.Application, *, host: str, port: int, silent_seconds: float = _SILENT_SECONDS
) -> AsyncIterator[str]:
    """Serve while the block runs; give the address, for example ``http://127.0.0.1:30000``.

    A client that goes away cancels what it asked for; one that asks nothing, or does not get to the end of a head, is
    closed after a while. Leaving closes all connections.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    runner = web.AppRunner(
        application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS, access_log=None, logger=_logger
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        closing = asyncio.create_task(_close_silent(runner, application, silent_seconds), name="silent connections")
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
    finally:
        await runner.cleanup()


async def _close_silent(runner: web.AppRunner, application: web.Application, seconds: float) -> None:
    silent = dict[Any, int]()
    while runner.server is not None:
        await asyncio.sleep(seconds)
        idle = {each: each._request_count for each in runner.server.connections if each._current_request is None}
        for connection, num_requests in idle.items():
            if silent.get(connection) != num_requests:
                continue  # it was not there, or has asked in between
            connection.force_close()
            if CLOSED_CONNECTIONS in application:
                application[CLOSED_CONNECTIONS]["silent_connections"] += 1
        silent = idle


async def decoded_body(body: bytes, *, large_bytes: int) -> Any:
    """Return the JSON value of a body; one beyond ``large_bytes`` is decoded in a thread, so that the loop goes on.

    Raises:
        ValueError: If it is none; the message says why.
    """
    decode = _decoder.decode
    try:
        return await asyncio.to_thread(decode, body) if len(body) > large_bytes else decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cause = "half of a surrogate pair in a text" if _LONE_SURROGATE.search(body) else error
        raise ValueError(f"the body is not JSON: {cause}") from None


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
