"""A fake router: passes generation on to workers, and like the real ones forwards no aborts."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from rollfeed.base.sglang_wire import error_content
from rollfeed.testing.fake_sglang.faulty import FaultyServer, Route
from rollfeed.testing.fake_sglang.http import Exchange, HttpRequest
from rollfeed.testing.fake_sglang.settings import FaultKind, RouterDialect

_FORWARDED = ("/generate", "/v1/completions", "/get_model_info", "/model_info", "/get_server_info", "/server_info")
_HEALTH = ("/health", "/health_generate", "/liveness", "/readiness")
_CONNECT_SECONDS = 5.0


@dataclass(eq=False, slots=True)
class _Worker:
    url: str
    worker_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    num_open: int = 0


class FakeRouter(FaultyServer):
    """One router on one port.

    ``policy`` is ``least_loaded`` or ``round_robin``; the API key is passed on to the workers.
    """

    def __init__(
        self,
        *,
        dialect: RouterDialect,
        host: str = "127.0.0.1",
        port: int = 0,
        workers: Iterable[str] = (),
        policy: str = "least_loaded",
        api_key: str | None = None,
    ) -> None:
        super().__init__(host=host, port=port, api_key=api_key)
        self.dialect = dialect
        self.num_forwarded: Counter[str] = Counter()
        """Requests passed on, by worker."""
        self._workers = [_Worker(url.rstrip("/")) for url in workers]
        self._policy = policy
        self._turn = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        await super().start()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            auto_decompress=False,
            trust_env=False,
        )

    async def stop(self) -> None:
        await super().stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def stats(self) -> dict[str, Any]:
        opened = {worker.url: worker.num_open for worker in self._workers}
        return {**super().stats(), "forwarded": dict(self.num_forwarded), "open": opened}

    def route(self, request: HttpRequest) -> Route:
        del request  # a path that is not there is found out by the dialect
        return self._answer

    def _answer(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if exchange.fault is not None and exchange.fault.kind is FaultKind.RESET:
            exchange.drop()
        elif path in _FORWARDED:
            task = asyncio.get_running_loop().create_task(self._forward(exchange))
            self._tasks.add(task)
            exchange.on_lost = task.cancel
            task.add_done_callback(self._tasks.discard)
        elif path in _HEALTH:
            exchange.respond(content_type=None)
        elif not (self._old(exchange) if self.dialect is RouterDialect.OLD else self._new(exchange)):
            exchange.respond(status=404, content_type=None)

    def _old(self, exchange: Exchange) -> bool:
        request = exchange.request
        url = (request.query("url") or "").rstrip("/")
        match request.method, request.path:
            case "GET", "/list_workers":
                exchange.respond_json({"urls": [worker.url for worker in self._workers]})
            case "POST", "/add_worker" | "/remove_worker" if not url:
                _say(exchange, "url is missing: give it in the query", status=400)
            case "POST", "/add_worker":
                if self._add(url) is None:
                    _say(exchange, f"{url} is there already", status=400)
                else:
                    _say(exchange, f"added {url}")
            case "POST", "/remove_worker":
                self._workers = [worker for worker in self._workers if worker.url != url]
                _say(exchange, f"removed {url}")
            case _:
                return False
        return True

    def _new(self, exchange: Exchange) -> bool:
        request = exchange.request
        if request.path == "/workers" and request.method == "GET":
            workers = [_described(worker) for worker in self._workers]
            exchange.respond_json({"workers": workers, "total": len(workers), "stats": {"regular_count": len(workers)}})
        elif request.path == "/workers" and request.method == "POST":
            self._add_by_body(exchange)
        elif request.path.startswith("/workers/") and request.method in ("GET", "DELETE"):
            self._one(exchange, request.path.removeprefix("/workers/"))
        else:
            return False
        return True

    def _add_by_body(self, exchange: Exchange) -> None:
        try:
            url = msgspec.json.decode(exchange.request.body, type=dict[str, Any]).get("url")
        except msgspec.DecodeError as error:
            exchange.respond_json({"error": str(error), "code": "BAD_REQUEST"}, status=400)
            return
        if not isinstance(url, str) or not url:
            exchange.respond_json({"error": "url is missing", "code": "BAD_REQUEST"}, status=400)
            return
        url = url.rstrip("/")
        # One that is there already keeps its id, and the answer is the same.
        worker = self._add(url) or next(each for each in self._workers if each.url == url)
        content = {"status": "accepted", "worker_id": worker.worker_id, "url": url, "message": "worker added"}
        exchange.respond_json({**content, "location": f"/workers/{worker.worker_id}"}, status=202)

    def _one(self, exchange: Exchange, worker_id: str) -> None:
        worker = next((each for each in self._workers if each.worker_id == worker_id), None)
        if worker is None:
            message = f"there is no worker {worker_id}"
            exchange.respond_json({"error": message, "code": "WORKER_NOT_FOUND"}, status=404)
        elif exchange.request.method == "GET":
            exchange.respond_json(_described(worker))
        else:
            self._workers.remove(worker)
            exchange.respond_json(
                {"status": "accepted", "worker_id": worker_id, "message": "worker removed"}, status=202
            )

    def _add(self, url: str) -> _Worker | None:
        if any(worker.url == url for worker in self._workers):
            return None
        worker = _Worker(url)
        self._workers.append(worker)
        return worker

    def _choose(self) -> _Worker | None:
        if not self._workers:
            return None
        turn = next(self._turn) % len(self._workers)
        if self._policy == "round_robin":
            return self._workers[turn]
        # From the next one on, so that equally loaded workers take turns.
        return min(self._workers[turn:] + self._workers[:turn], key=lambda worker: worker.num_open)

    async def _forward(self, exchange: Exchange) -> None:
        worker = self._choose()
        if worker is None:
            exchange.respond_json(error_content("No available workers"), status=503)
            return
        worker.num_open += 1
        self.num_forwarded[worker.url] += 1
        try:
            await self._relay(exchange, worker.url)
        except aiohttp.ClientError as error:
            exchange.respond_json(error_content(f"Worker {worker.url} failed: {error}"), status=502)
        finally:
            worker.num_open -= 1

    async def _relay(self, exchange: Exchange, url: str) -> None:
        assert self._session is not None
        request = exchange.request
        headers = {"content-type": "application/json"}
        if request.authorization is not None:
            headers["authorization"] = request.authorization
        sent = self._session.request(request.method, url + request.target, data=request.body, headers=headers)
        async with sent as response:
            content_type = response.headers.get("content-type")
            if response.content_type != "text/event-stream":
                exchange.respond([await response.read()], status=response.status, content_type=content_type)
                return
            exchange.start_stream(status=response.status)
            try:
                async for piece in response.content.iter_any():
                    exchange.send([piece])
            except aiohttp.ClientError:
                exchange.drop()
            exchange.end_stream()


def _described(worker: _Worker) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "url": worker.url,
        "model_id": "unknown",
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": True,
        "load": worker.num_open,
        "connection_mode": "http",
    }


def _say(exchange: Exchange, text: str, *, status: int = 200) -> None:
    exchange.respond([text.encode()], status=status, content_type="text/plain; charset=utf-8")
