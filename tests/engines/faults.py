"""A proxy before a real server that injures some of the requests on their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from rollfeed.base.serving import serve_application

Fault = Callable[["FaultyProxy", web.Request], Any]


class FaultyProxy:
    """Passes requests on, but for those that ``injures`` finds by their bodies, which meet the fault each time."""

    def __init__(self, target: str, fault: Fault, injures: Callable[[bytes], bool]) -> None:
        self._target, self._fault, self._injures = target, fault, injures
        self.num_injured = 0
        self.num_passed = 0
        self.closing = asyncio.Event()
        self.http: aiohttp.ClientSession

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self._injures(body):
            self.num_injured += 1
            injured = await self._fault(self, request)
            if injured is not None:
                return injured  # type: ignore[no-any-return]
        self.num_passed += 1
        async with self.http.post(self._target + request.path, data=body, headers=JSON) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")


JSON = {"Content-Type": "application/json"}


async def hang(proxy: FaultyProxy, request: web.Request) -> Any:
    await proxy.closing.wait()


async def cut(proxy: FaultyProxy, request: web.Request) -> Any:
    """Close the connection in the middle of a reply that has begun."""
    reply = web.StreamResponse(headers={**JSON, "Content-Length": "1000"})
    await reply.prepare(request)
    await reply.write(b'{"data": [')
    assert request.transport is not None
    request.transport.abort()
    return reply


async def broken(proxy: FaultyProxy, request: web.Request) -> Any:
    return web.Response(status=500, text="broken")


async def busy_once(proxy: FaultyProxy, request: web.Request) -> Any:
    """Every other time."""
    return web.Response(status=429, text="slow down") if proxy.num_injured % 2 else None


async def nonsense(proxy: FaultyProxy, request: web.Request) -> Any:
    return web.Response(
        text='{"data": [], "embedding": "no", "choices": [{"message": {"content": "hm 3 7"}}]}', headers=JSON
    )


@asynccontextmanager
async def faulty(
    target: str, fault: Fault, *, injures: Callable[[bytes], bool]
) -> AsyncIterator[tuple[FaultyProxy, str]]:
    """Run a proxy before the server at ``target``; gives it and its address."""
    proxy, application = FaultyProxy(target, fault, injures), web.Application(client_max_size=1 << 26)
    application.add_routes([web.post("/{path:.*}", proxy.handle)])
    async with (
        # Servers close connections that nobody uses for some seconds: each request has one of its own.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), trust_env=False) as proxy.http,
        serve_application(application, host="127.0.0.1", port=0) as address,
    ):
        try:
            yield proxy, address
        finally:
            proxy.closing.set()
