"""The router as a web application: what is served where, and what lives as long as it does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from rollfeed.base.serving import PROMETHEUS_TYPE, prometheus_text, serve_application
from rollfeed.base.sglang_wire import RequestError
from rollfeed.config.api_key import ApiKey
from rollfeed.engine.http import Connections, Http
from rollfeed.engine.http.json_answers import Handler, errors_as_json, json_reply, read_json
from rollfeed.router.fleet import Fleet
from rollfeed.router.fleet_control import RouterControl
from rollfeed.router.forwarding import Forwarder, KeepsSpans
from rollfeed.router.members import MemberState
from rollfeed.router.router_metrics import router_families, span_families
from rollfeed.router.router_settings import RouterSettings
from rollfeed.router.span_cache import SpanCacheUse
from rollfeed.router.watching import Watcher
from rollfeed.router.weight_updates import WeightUpdates
from rollfeed.router.worker_kinds import ROUTES, WorkerAsker

_MAX_BODY_BYTES = 1 << 28
_MOST_CONNECTIONS = 1 << 20
_UNAVAILABLE = 503
_ANY_WORKER = (
    "/get_model_info",
    "/model_info",
    "/get_server_info",
    "/server_info",
    "/v1/models",
    "/weight_info",
    "/get_world_size",
    "/version",
)
"""Routes without a body that any worker with the current weights may answer."""


class SpanStore(KeepsSpans, Protocol):
    """Cache of spans that can also be asked."""

    def retrieve(self, text: str) -> dict[str, Any]:
        """Return tokens, log-probabilities, mask and versions of a text."""

    def use(self) -> SpanCacheUse:
        """Return what it holds and has done."""


class RouterService:
    """Everything that answers, and what it counts; entered with ``async with``."""

    def __init__(self, settings: RouterSettings, *, api_key: ApiKey, spans: SpanStore | None = None) -> None:
        self.fleet = Fleet(settings)
        self._settings = settings
        self._api_key = api_key
        self._spans = spans
        self._replies: Counter[tuple[str, int]] = Counter()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> RouterService:
        settings, fleet = self._settings, self.fleet
        http = await self._stack.enter_async_context(
            Http(
                api_key=self._api_key,
                max_connections=_MOST_CONNECTIONS,
                control_timeout_seconds=settings.control_seconds,
                keeps_reads_open=True,
            )
        )
        connections = Connections(limit=_MOST_CONNECTIONS, headers=self._api_key.headers)
        self._stack.push_async_callback(connections.close)
        asker = WorkerAsker(http, control_seconds=settings.control_seconds, update_seconds=settings.update_seconds)
        self.watcher = Watcher(fleet, asker)
        updates = WeightUpdates(fleet, asker, self.watcher)
        self._forwarder = Forwarder(fleet, connections, asker, spans=self._spans)
        for part in (self.watcher, updates, self._forwarder):
            self._stack.push_async_callback(part.close)
        self._control = RouterControl(
            fleet,
            asker=asker,
            http=http,
            watcher=self.watcher,
            updates=updates,
            forwarder=self._forwarder,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    def application(self) -> web.Application:
        """Return the application of an entered service."""
        application = web.Application(middlewares=[self._counted, errors_as_json], client_max_size=_MAX_BODY_BYTES)
        forward = self._forwarder.forward
        application.add_routes([web.post(path, forward) for path in ROUTES])
        application.add_routes([web.put("/generate", forward), *(web.get(path, forward) for path in _ANY_WORKER)])
        application.add_routes(self._control.routes())
        told = {"/health": self._health, "/health_generate": self._health, "/readiness": self._health}
        application.add_routes([web.get(path, answer) for path, answer in told.items()])
        application.add_routes([web.get("/liveness", self._live), web.get("/metrics", self._metrics)])
        application.add_routes([web.get("/v1/loads", self._loads), web.get("/get_load", self._loads)])
        application.add_routes([web.get("/get_loads", self._token_loads)])
        application.add_routes([web.post("/retrieve_from_text", self._retrieve)])
        return application

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "other"
        self._replies[path, response.status] += 1
        if response.status == _UNAVAILABLE and not response.prepared:
            response.headers.setdefault("Retry-After", "1")
        return response

    async def _live(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _health(self, _request: web.Request) -> web.Response:
        """Answer 200 where a request would find a worker, now or when what keeps all of them is over."""
        if self.fleet.ready:
            return web.Response()
        raise RequestError(f"no worker may have requests: {self.fleet.told_states()}", status=_UNAVAILABLE)

    async def _metrics(self, _request: web.Request) -> web.Response:
        spans = () if self._spans is None else span_families(self._spans.use())
        text = prometheus_text([*router_families(self.fleet, self._replies), *spans])
        return web.Response(body=text, headers={"Content-Type": PROMETHEUS_TYPE})

    async def _loads(self, request: web.Request) -> web.Response:
        loads = [
            {
                "worker": member.address,
                "num_running_reqs": member.num_running,
                "num_waiting_reqs": member.num_waiting,
                "num_reqs": member.num_running + member.num_waiting,
                "token_usage": member.kv_use,
            }
            for member in self.fleet
        ]
        return await json_reply({"loads": loads} if request.path == "/v1/loads" else loads)

    async def _token_loads(self, _request: web.Request) -> web.Response:
        """Answer as SGLang's router: the tokens of each worker's prompts, -1 of one that does not answer."""
        lost = (MemberState.JOINING, MemberState.DOWN)
        loads = [(each.address, -1 if each.state in lost else each.num_tokens) for each in self.fleet]
        return await json_reply({"workers": [{"worker": address, "load": load} for address, load in loads]})

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        if self._spans is None:
            raise RequestError("there is no span cache: start the router with --span-cache and --tokenizer", status=404)
        text = body.get("text")
        if not isinstance(text, str):
            raise RequestError("text is missing: give the text whose tokens are wanted")
        return await json_reply(self._spans.retrieve(text))


@asynccontextmanager
async def serve_router(
    workers: Sequence[str],
    settings: RouterSettings,
    *,
    host: str,
    port: int,
    api_key: ApiKey,
    spans: SpanStore | None = None,
) -> AsyncIterator[tuple[str, RouterService]]:
    """Serve while the block runs; give the address and the service, which has asked all workers once by then.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    async with RouterService(settings, api_key=api_key, spans=spans) as service:
        starting = asyncio.create_task(service.watcher.start(list(dict.fromkeys(workers))))
        try:
            serving = serve_application(
                service.application(), host=host, port=port, key=api_key.value, descriptors_each=2
            )
            async with serving as address:
                await starting
                yield address, service
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
