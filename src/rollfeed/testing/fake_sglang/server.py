"""A fake SGLang server: its routes over a backend, and its faults."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rollfeed.base.sglang_wire import RequestError, error_content
from rollfeed.testing.fake_sglang.control import ControlRoutes
from rollfeed.testing.fake_sglang.core import ServerCore
from rollfeed.testing.fake_sglang.faulty import Route
from rollfeed.testing.fake_sglang.http import Exchange, HttpRequest
from rollfeed.testing.fake_sglang.settings import FakeSettings, FaultKind, Release
from rollfeed.testing.fake_sglang.tokens import Part
from rollfeed.testing.fake_sglang.wire import (
    FakeCall,
    FakeJob,
    joined_replies,
    parse_generate,
    raw_lie,
    reply_parts,
    spoilt,
)

_BODY_FAULTS = (
    FaultKind.RESET,
    FaultKind.TRUNCATED_JSON,
    FaultKind.WRONG_LOGPROB_COUNT,
    FaultKind.MISSING_FINISH_REASON,
    FaultKind.LIE,
)


class FakeServer(ServerCore):
    """One server on one port."""

    def __init__(self, settings: FakeSettings, **options: Any) -> None:
        super().__init__(settings, **options)
        self._make_routes()

    def route(self, request: HttpRequest) -> Route | None:
        found = self._routes.get((request.method, request.path))
        if found is None and any(path == request.path for _, path in self._routes):
            return lambda exchange: exchange.respond_json({"detail": "Method Not Allowed"}, status=405)
        return found

    def own_routes(self) -> Mapping[tuple[str, str], Route]:
        return self._own_routes

    async def restart(self) -> None:
        self._make_routes()
        await super().restart()

    def _make_routes(self) -> None:
        control = ControlRoutes(self)
        self._own_routes = {**super().own_routes(), **control.own_routes()}
        self._routes = {**control.routes(), ("POST", "/generate"): self._generate, ("PUT", "/generate"): self._generate}

    def _generate(self, exchange: Exchange) -> None:
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
        self.begin(_Answer(self, exchange, call).begin)


class _Answer:
    """A call of ``/generate`` under way, and the fault its reply has."""

    def __init__(self, server: FakeServer, exchange: Exchange, call: FakeCall) -> None:
        self._server = server
        self._exchange = exchange
        self._call = call
        self._fault = exchange.fault
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

    def _ended(self, index: int, job: FakeJob) -> None:
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

    def _send_event(self, index: int, job: FakeJob) -> None:
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
        elif fault is not None and fault.lie is not None and (raw := raw_lie(fault.lie)) is not None:
            self._exchange.respond_raw(raw)
        else:
            self._exchange.respond(parts if fault is None else spoilt(parts, fault))

    def _parts(self, job: FakeJob, *, index: int | None = None) -> list[Part]:
        seconds = self._server.clock.now() - self._arrived
        return reply_parts(job, seconds=seconds, sent=time.time(), index=index)

    def _client_left(self) -> None:
        jobs = set(self._call.jobs)
        self._server.backend.abort(lambda job: job in jobs)
