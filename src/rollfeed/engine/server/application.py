"""The web application, and how it is served and ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollfeed.engine.server.control import ControlHandlers
from rollfeed.engine.server.generating import GenerateHandlers
from rollfeed.engine.server.openai_handlers import OpenAIHandlers
from rollfeed.engine.server.service import Service
from rollfeed.engine.server.wire import errors_as_json
from rollfeed.errors import ConfigError, EngineError

_MAX_BODY_BYTES = 1 << 28
_SHUTDOWN_SECONDS = 0.5
"""For replies under way, after everything that runs has been aborted."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a failure is the server's; bytes that are not HTTP are answered 400, and routers probe with such."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_http_logger = logging.getLogger("rollfeed.engine.server.http")
_http_logger.addFilter(_is_ours)


def create_application(service: Service) -> web.Application:
    """Return the application of a service whose engine is entered."""
    application = web.Application(middlewares=[errors_as_json], client_max_size=_MAX_BODY_BYTES)
    for handlers in (GenerateHandlers(service), OpenAIHandlers(service), ControlHandlers(service)):
        application.add_routes(handlers.routes())
    return application


@asynccontextmanager
async def serve(service: Service, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block runs; give the address, for example ``http://127.0.0.1:30000``.

    A client that goes away aborts what it asked for. Leaving aborts everything, lets the partial
    replies out and closes all connections.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    runner = web.AppRunner(
        create_application(service),
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        access_log=None,
        logger=_http_logger,
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"port = {port}: cannot listen on {host}:{port} ({error.strerror or error})") from error
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        with suppress(EngineError):
            await service.engine.abort()
        await runner.cleanup()
