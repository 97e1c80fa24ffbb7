"""Web applications in a thread of their own, as ``slime.agent.aiohttp_threaded`` serves them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.web_log import AccessLogger as FilteredAccessLogger

from rollfeed.base.serving import serve_application

__all__ = ["AppHandle", "FilteredAccessLogger", "run_app_in_thread"]
_END_SECONDS = 10.0


class AppHandle(NamedTuple):
    """An application that is being served."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event

    def stop(self) -> None:
        """Close its connections and wait for its thread."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.ended.set)
            self.thread.join(_END_SECONDS)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "0.0.0.0",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve an application until the process ends, and return when it listens.

    Whatever ``runner_kwargs`` say, a client that leaves cancels its request, and requests are not logged. Raises
    ConfigError if the address cannot be listened on.
    """
    del runner_kwargs
    started: Future[AppHandle] = Future()

    async def serve() -> None:
        ended = asyncio.Event()
        try:
            async with serve_application(app, host=host, port=port) as address:
                loop = asyncio.get_running_loop()
                started.set_result(AppHandle(host, urlsplit(address).port or port, thread, loop, ended))
                await ended.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name=thread_name, daemon=True)
    thread.start()
    return started.result(start_timeout_sec)
