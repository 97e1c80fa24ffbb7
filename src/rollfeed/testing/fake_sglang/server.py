"""A fake SGLang server: its routes over a backend, and its faults."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from rollfeed.testing.fake_sglang.clock import Clock, LoopClock
from rollfeed.testing.fake_sglang.control import CONTROL_PATHS, ControlRoutes, Route
from rollfeed.testing.fake_sglang.faults import FaultBook, FaultKind, ServerFault
from rollfeed.testing.fake_sglang.http import Exchange, HttpServer
from rollfeed.testing.fake_sglang.scripted import ScriptedBackend
from rollfeed.testing.fake_sglang.settings import FakeMode, FakeSettings, Release
from rollfeed.testing.fake_sglang.time_model import TimeModel
from rollfeed.testing.fake_sglang.tokens import Part
from rollfeed.testing.fake_sglang.wire import (
    Backend,
    GenerateCall,
    Job,
    RequestError,
    error_content,
    joined_replies,
    parse_generate,
    reply_parts,
    spoilt,
)

_DIED = 1
_POLL_SECONDS = 0.01
_BODY_FAULTS = (
    FaultKind.RESET,
    FaultKind.TRUNCATED_JSON,
    FaultKind.WRONG_LOGPROB_COUNT,
    FaultKind.MISSING_FINISH_REASON,
)


class FakeServer:
    """One server on one port.

    Args:
        settings: How it behaves.
        port: Where it listens; 0 takes a free port.
        ends_process: Whether dying ends the process instead of the server's sockets.
        clock: Of its engine; None is the event loop's at the set speed.
    """

    def __init__(
        self, settings: FakeSettings, *, port: int = 0, ends_process: bool = False, clock: Clock | None = None
    ) -> None:
        self.settings = settings
        self.faults = FaultBook(settings.faults)
        self.clock = clock or LoopClock(speed=settings.speed)
        self.http = HttpServer(self._handle, host=settings.host, port=port)
        self.weight_version = "default"
        self.previous_version = "default"
        self.num_requests: Counter[str] = Counter()
        """Requests taken, by path."""
        self.kept_requests: deque[bytes] = deque(maxlen=0 if settings.mode is FakeMode.ZERO else settings.keep_requests)
        """Bodies of the latest calls of ``/generate``."""
        self.finished: Counter[str] = Counter()
        """Ended responses, by the type of their finish reason."""
        self.backend: Backend = self._make_backend()
        self._behind: list[_Answer] | None = None
        """Calls that wait behind an update, while there is one."""
        self._ends_process = ends_process
        self._timers: set[asyncio.TimerHandle] = set()
        self._restart: asyncio.Task[None] | None = None
        self._routes: dict[tuple[str, str], Route] = {
            **ControlRoutes(self).routes(),
            ("POST", "/generate"): self._generate,
            ("PUT", "/generate"): self._generate,
        }

    @property
    def address(self) -> str:
        return self.http.address

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: If the port is taken.
        """
        await self.http.start()
        self._order()

    async def stop(self) -> None:
        """Drop all connections and stop listening."""
        for timer in self._timers:
            timer.cancel()
        if self._restart is not None:
            self._restart.cancel()
        self.http.stop()
        self.backend.abort(lambda _: True)

    def add_fault(self, fault: ServerFault) -> None:
        """Put a fault in force."""
        self.faults.add(fault)
        self._order()

    def stats(self) -> dict[str, Any]:
        """Return what has happened since the start."""
        usage = self.backend.usage()
        return {
            "requests": dict(self.num_requests),
            "faults": dict(self.faults.fired),
            "finished": dict(self.finished),
            "num_connections": len(self.http.connections),
            "most_connections": self.http.most_connections,
            "weight_version": self.weight_version,
            "clock_seconds": self.clock.now(),
            **msgspec.to_builtins(usage),
        }

    def _make_backend(self) -> Backend:
        if self.settings.mode is FakeMode.TIME_MODEL:
            return TimeModel(self.settings.time_model, self.clock)
        return ScriptedBackend(self.clock, self.settings.script)

    def _handle(self, exchange: Exchange) -> None:
        path = exchange.request.path
        self.num_requests[path] += 1
        route = self._routes.get((exchange.request.method, path))
        if route is None:
            exchange.respond_json({"detail": "Not Found"}, status=404)
            return
        is_control = path in CONTROL_PATHS
        if not is_control and exchange.refused(self.settings.api_key):
            return
        fault = None if is_control else self.faults.take(path)
        if fault is None:
            self._call(route, exchange, None)
        else:
            self._suffer(fault, route, exchange)

    def _call(self, route: Route, exchange: Exchange, fault: ServerFault | None) -> None:
        try:
            route(exchange, fault)
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
                self.later(fault.seconds or 0.0, lambda: self._call(route, exchange, None))
            case _:
                self._call(route, exchange, fault)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something after real seconds, unless the server is stopped before."""

        def run() -> None:
            self._timers.discard(timer)
            action()

        timer = asyncio.get_running_loop().call_later(seconds, run)
        self._timers.add(timer)

    def _refuse(self, seconds: float | None) -> None:
        self.http.stop()

        def listen() -> None:
            self._restart = asyncio.ensure_future(self.http.start())

        if seconds is not None:
            self.later(seconds, listen)

    def _order(self) -> None:
        for fault in self.faults.take_ordered():
            self._cease(fault)

    def _cease(self, fault: ServerFault) -> None:
        if fault.kind is FaultKind.DIE:
            self.later(fault.seconds or 0.0, self.die)
        else:
            self._refuse(fault.seconds)

    def die(self) -> None:
        """End at once, as a killed process does."""
        if self._ends_process:
            os._exit(_DIED)
        self.http.stop()
        self.backend.abort(lambda _: True)

    async def restart(self) -> None:
        """Listen again after ``die``, as a new process on the same port does: idle, with the first weights."""
        self.weight_version = self.previous_version = "default"
        self.backend = self._make_backend()
        self._behind = None
        self._routes.update(ControlRoutes(self).routes())
        await self.http.start()

    def _generate(self, exchange: Exchange, fault: ServerFault | None) -> None:
        self.kept_requests.append(exchange.request.body)
        call = parse_generate(
            exchange.request.body,
            context_length=self.settings.context_length,
            default_max_new_tokens=self.settings.max_new_tokens,
            on_end=lambda _: None,
        )
        if self.settings.max_waiting is not None:
            usage = self.backend.usage()
            room = usage.max_running - usage.num_running + self.settings.max_waiting
            if usage.num_waiting + len(call.jobs) > room:
                raise RequestError("The request queue is full.", status=429)
        answer = _Answer(self, exchange, call, fault)
        if self._behind is None:
            answer.begin()
        else:
            self._behind.append(answer)

    def set_version(self, version: str | None, *, num_late: int = 0) -> None:
        """Serve another weight version from now on; None keeps the name.

        Args:
            version: Its name.
            num_late: Of the tokens that requests have, so many count to it already.
        """
        self.previous_version = self.weight_version
        if version is not None:
            self.weight_version = version
            for job, num_tokens in self.backend.progress():
                job.note_version(max(0, num_tokens - num_late), version)

    def when_idle(self, action: Callable[[], object]) -> None:
        """Do something once all that runs has ended; new calls wait behind it."""
        self._behind = [] if self._behind is None else self._behind

        def look() -> None:
            usage = self.backend.usage()
            if usage.num_running + usage.num_waiting > 0:
                self.later(_POLL_SECONDS, look)
                return
            action()
            behind, self._behind = self._behind or [], None
            for answer in behind:
                answer.begin()

        look()


class _Answer:
    """A call of ``/generate`` under way, and the fault its reply has."""

    def __init__(self, server: FakeServer, exchange: Exchange, call: GenerateCall, fault: ServerFault | None) -> None:
        self._server = server
        self._exchange = exchange
        self._call = call
        self._fault = fault
        self._num_open = len(call.jobs)
        self._arrived = server.clock.now()

    def begin(self) -> None:
        """Submit the jobs; whoever ends last sends the reply."""
        if self._server.settings.abort_on_disconnect:
            self._exchange.on_lost = self._client_left
        if self._call.stream:
            self._exchange.start_stream()
        for index, job in enumerate(self._call.jobs):
            job.on_end = functools.partial(self._ended, index)
            if self._server.settings.release is Release.V0_5_23:
                job.versions = [(0, self._server.weight_version)]
            if self._call.stream:
                job.on_progress = functools.partial(self._send_event, index)
            self._server.backend.submit(job)

    def _ended(self, index: int, job: Job) -> None:
        job.weight_version = self._server.weight_version
        if self._fault is not None and self._fault.kind is FaultKind.STALE_VERSION:
            job.weight_version = self._server.previous_version
            job.versions = [(0, job.weight_version)] if job.versions else []
        self._server.finished[str((job.finish_reason or {}).get("type", "error"))] += 1
        self._num_open -= 1
        if self._call.stream:
            self._send_event(index, job)
        if self._num_open == 0:
            self._reply()

    def _send_event(self, index: int, job: Job) -> None:
        if job.finish_reason is None:
            job.weight_version = self._server.weight_version
        if job.status != 200:
            self._exchange.send([b"data: ", msgspec.json.encode(error_content(job.error)), b"\n\n"])
            return
        parts = self._parts(job, index=None if self._call.is_single else index)
        fault = self._fault
        if fault is None or fault.kind not in _BODY_FAULTS or job.finish_reason is None:
            self._exchange.send([b"data: ", *parts, b"\n\n"])
            return
        if fault.kind is FaultKind.RESET:
            self._exchange.drop()
            return
        self._exchange.send([b"data: ", *spoilt(parts, fault), b"\n\n"])

    def _reply(self) -> None:
        if self._call.stream:
            self._exchange.send([b"data: [DONE]\n\n"])
            self._exchange.end_stream()
            return
        failed = next((job for job in self._call.jobs if job.status != 200), None)
        if failed is not None:
            self._exchange.respond_json(error_content(failed.error), status=failed.status)
            return
        replies = [self._parts(job) for job in self._call.jobs]
        parts = replies[0] if self._call.is_single else joined_replies(replies)
        fault = self._fault
        if fault is not None and fault.kind is FaultKind.RESET:
            self._exchange.reset(parts, fraction=fault.fraction)
        else:
            self._exchange.respond(parts if fault is None else spoilt(parts, fault))

    def _parts(self, job: Job, *, index: int | None = None) -> list[Part]:
        seconds = self._server.clock.now() - self._arrived
        return reply_parts(job, seconds=seconds, sent=time.time(), index=index)

    def _client_left(self) -> None:
        jobs = set(self._call.jobs)
        self._server.backend.abort(lambda job: job in jobs)
