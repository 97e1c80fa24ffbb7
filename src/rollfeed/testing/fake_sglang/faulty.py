"""A server on one port whose requests meet faults; the fake server and the fake router are such."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from rollfeed.base.sglang_wire import RequestError, error_content
from rollfeed.errors import ConfigError
from rollfeed.testing.fake_sglang.http import Exchange, HttpRequest, HttpServer
from rollfeed.testing.fake_sglang.settings import FaultBook, FaultKind, ServerFault

Route: TypeAlias = Callable[[Exchange], object]


class FaultyServer(ABC):
    """Listens, hands requests to routes, and lets faults meet them.

    Port 0 takes a free one; ``faults`` are in force from the start.
    """

    def __init__(self, *, host: str, port: int, api_key: str | None, faults: Iterable[ServerFault] = ()) -> None:
        self.faults = FaultBook(faults)
        self.http = HttpServer(self._handle, host=host, port=port)
        self.num_requests: Counter[str] = Counter()
        """Requests taken, by path."""
        self._api_key = api_key
        self._timers: set[asyncio.TimerHandle] = set()
        self._restart: asyncio.Task[None] | None = None

    @abstractmethod
    def route(self, request: HttpRequest) -> Route | None:
        """Return what is done with a request, or None where there is no such route."""

    @property
    def address(self) -> str:
        return self.http.address

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port is taken."""
        await self.http.start()
        self._order()

    async def stop(self) -> None:
        """Drop all connections, stop listening, and leave the port to others."""
        for timer in self._timers:
            timer.cancel()
        if self._restart is not None:
            self._restart.cancel()
        self.http.close()

    def add_fault(self, fault: ServerFault) -> None:
        """Put a fault in force."""
        self.faults.add(fault)
        self._order()

    def stats(self) -> dict[str, Any]:
        """Return what has happened since the start."""
        return {"requests": dict(self.num_requests), "faults": dict(self.faults.fired)}

    def own_routes(self) -> Mapping[tuple[str, str], Route]:
        """Return the routes of the fake itself, which no fault meets and which need no key."""
        return {
            ("GET", "/stats"): lambda exchange: exchange.respond_json(self.stats()),
            ("GET", "/fault"): lambda exchange: exchange.respond_json(self.faults.in_force()),
            ("POST", "/fault"): self._add_faults,
            ("DELETE", "/fault"): self._clear_faults,
        }

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something after real seconds, unless the server is stopped before."""

        def run() -> None:
            self._timers.discard(timer)
            action()

        timer = asyncio.get_running_loop().call_later(seconds, run)
        self._timers.add(timer)

    def die(self) -> None:
        """End at once, as a killed process does."""
        self.http.stop()

    def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        self.num_requests[request.path] += 1
        own = self.own_routes().get((request.method, request.path))
        route = own or self.route(request)
        if route is None:
            exchange.respond_json({"detail": "Not Found"}, status=404)
        elif own is not None:
            self._call(own, exchange)
        elif not exchange.refused(self._api_key):
            fault = self.faults.take(request.path)
            if fault is None:
                self._call(route, exchange)
            else:
                self._suffer(fault, route, exchange)

    def _call(self, route: Route, exchange: Exchange) -> None:
        try:
            route(exchange)
        except RequestError as error:
            exchange.respond_json(error_content(str(error)), status=error.status)
        except msgspec.DecodeError as error:
            exchange.respond_json(error_content(f"the body is not what this route takes: {error}"), status=400)

    def _suffer(self, fault: ServerFault, route: Route, exchange: Exchange) -> None:
        match fault.kind:
            case FaultKind.REFUSE | FaultKind.DIE:
                self._cease(fault)
            case FaultKind.HANG:
                if fault.seconds is not None:
                    self.later(fault.seconds, exchange.drop)
            case FaultKind.STATUS:
                exchange.respond_json(error_content(fault.message), status=fault.status)
            case FaultKind.DELAY | FaultKind.SLOW_HEALTH:
                self.later(fault.seconds or 0.0, lambda: self._call(route, exchange))
            case _:
                exchange.fault = fault
                self._call(route, exchange)

    def _order(self) -> None:
        for fault in self.faults.take_ordered():
            self._cease(fault)

    def _cease(self, fault: ServerFault) -> None:
        if fault.kind is FaultKind.DIE:
            self.later(fault.seconds or 0.0, self.die)
            return
        self.http.stop()

        def listen() -> None:
            self._restart = asyncio.ensure_future(self.http.start())

        if fault.seconds is not None:
            self.later(fault.seconds, listen)

    def _add_faults(self, exchange: Exchange) -> None:
        faults = decoded(exchange, list[ServerFault] | ServerFault)
        # Answered first: a server that stops listening drops those that wait for an answer.
        exchange.respond_json(faults)
        for fault in faults:
            self.add_fault(fault)

    def _clear_faults(self, exchange: Exchange) -> None:
        self.faults.clear()
        exchange.respond_json([])


def decoded(exchange: Exchange, kind: Any) -> list[Any]:
    """Return one or several things of a body as a list."""
    try:
        content = msgspec.json.decode(exchange.request.body, type=kind)
    except ConfigError as error:
        raise RequestError(str(error)) from error
    return content if isinstance(content, list) else [content]
