"""Servers on loopback ports: the embedded engine's, and small ones that answer from a script."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.testing import CharTokenizer
from rollfeed.testing.held_port import hold_port
from rollfeed.types import SamplingParams
from rollfeed.weights import DiskTransport

FAST: dict[str, Any] = {
    "concurrency": 64,
    "probe_interval_seconds": 0.05,
    "probe_timeout_seconds": 20.0,
    "request_timeout_seconds": 120.0,
    "startup_timeout_seconds": 60.0,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply_of(
    token_ids: list[int], *, to: Any = None, finish: Any = None, version: str = "default", **meta: Any
) -> dict[str, Any]:
    """The object that a server answers with ``to`` a request; every token has logprob -0.5."""
    asked = {} if to is None else {"id": to["rid"], "prompt_tokens": len(to["input_ids"])}
    return {
        "text": "".join(chr(97 + token_id % 26) for token_id in token_ids),
        "output_ids": token_ids,
        "meta_info": {
            "finish_reason": finish or {"type": "length", "length": len(token_ids)},
            "completion_tokens": len(token_ids),
            "cached_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in token_ids],
            "output_token_logprobs_length": len(token_ids),
            **asked,
            **meta,
        },
    }


class ScriptedServer:
    """Speaks the protocol, keeps what it was sent, and answers ``/generate`` as it is told.

    Its state outlives its socket, so that it can be killed and started again on the same port.
    """

    def __init__(self) -> None:
        self.generate: Handler = self.answer_whole
        self.calls: list[tuple[str, Any]] = []
        self.version = "default"
        self.running = 0
        self.health_delay: asyncio.Event | None = None
        self.update_gate: asyncio.Event | None = None
        self.abort_gate: asyncio.Event | None = None
        self.pending: dict[str, tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        self.arrived = asyncio.Event()
        self.answers: dict[str, Handler] = {}
        self.port = 0
        self._held: socket.socket | None = None
        """Keeps the port while nobody listens."""
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Bodies of ``/generate``, in order."""
        return [body for path, body in self.calls if path == "/generate"]

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    async def start(self) -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self._let_go()

    async def kill(self) -> None:
        """Close the socket and every connection, without an answer to anybody."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        self._held = hold_port(port=self.port)
        await asyncio.sleep(0.01)  # what was accepted before is among its connections then
        if runner.server is not None:
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()

    async def close(self) -> None:
        """Be killed, and leave the port to others."""
        await self.kill()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = json.loads(content) if content else {}
        self.calls.append((request.path, body))
        if request.path in self.answers:
            return await self.answers[request.path](request)
        if request.path == "/generate":
            self.arrived.set()
            self.running += 1
            try:
                return await self.generate(request)
            finally:
                self.running -= 1
        return await self._control(request.path, body)

    async def _control(self, path: str, body: Any) -> web.StreamResponse:
        if path == "/health":
            if self.health_delay is not None:
                await self.health_delay.wait()
            return web.Response()
        if path in ("/get_model_info", "/model_info"):
            return web.json_response({"model_path": "m", "weight_version": self.version})
        if path == "/get_server_info":
            return web.json_response({"dtype": "bfloat16"})
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 100_000}]})
        if path == "/v1/loads":
            load = {"num_running_reqs": self.running, "num_waiting_reqs": 0, "gen_throughput": 100.0}
            return web.json_response({"loads": [load]})
        if path == "/abort_request" or (path == "/pause_generation" and body.get("mode") == "abort"):
            if self.abort_gate is not None:
                await self.abort_gate.wait()
            self.abort(body.get("rid"))
            return web.Response()
        if path == "/update_weights_from_disk":
            if self.update_gate is not None:
                await self.update_gate.wait()
            self.version = body["weight_version"]
            return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})
        if path in ("/pause_generation", "/continue_generation", "/flush_cache"):
            return web.json_response({"message": "ok"})
        return web.Response(status=404)

    def abort(self, rid: str | None) -> None:
        for known, (body, future) in self.pending.items():
            if (rid is None or known.startswith(rid)) and not future.done():
                finish = {"type": "abort", "message": "Aborted"}
                future.set_result(reply_of([7, 8], to=body, finish=finish, version=self.version))

    async def answer_whole(self, request: web.Request) -> web.StreamResponse:
        """As many tokens as were asked for."""
        body = await request.json()
        wanted = body["sampling_params"]["max_new_tokens"]
        return web.json_response(reply_of([5] * wanted, to=body, version=self.version))

    async def hold(self, request: web.Request) -> web.StreamResponse:
        """Two tokens, when aborted; nothing otherwise."""
        body = await request.json()
        rid, future = body["rid"], asyncio.get_running_loop().create_future()
        self.pending[rid] = body, future
        try:
            return web.json_response(await future)
        finally:
            del self.pending[rid]


Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """Wait for something that has no event of its own."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.005)

    return wait


Scripted = Callable[..., AbstractAsyncContextManager[list[ScriptedServer]]]


@pytest.fixture
def scripted() -> Scripted:
    """Start a number of scripted servers."""

    @asynccontextmanager
    async def start(count: int = 1) -> AsyncIterator[list[ScriptedServer]]:
        async with AsyncExitStack() as stack:
            servers = [ScriptedServer() for _ in range(count)]
            for server in servers:
                await server.start()
                stack.push_async_callback(server.close)
            yield servers

    return start


@pytest.fixture
def engine_at() -> Callable[..., ServerEngine]:
    """Make an engine for servers, or with ``router``."""

    def make(*servers: Any, transport: Any = None, **changes: Any) -> ServerEngine:
        context_length, vocab_size = changes.pop("context_length", 4096), changes.pop("vocab_size", 2**31)
        addresses = tuple(server if isinstance(server, str) else server.address for server in servers)
        folder = changes.get("weights_folder")
        settings = SGLangSettings(**{**FAST, "workers": addresses, **changes})
        return ServerEngine(
            SGLang(settings),
            context_length=context_length,
            tokenizer=CharTokenizer(),
            vocab_size=vocab_size,
            transport=transport or DiskTransport(None if folder is None else Path(folder)),
        )

    return make


@pytest.fixture
def asked() -> Callable[..., SamplingParams]:
    def make(max_new_tokens: int = 4, **changes: Any) -> SamplingParams:
        return SamplingParams(max_new_tokens=max_new_tokens, **changes)

    return make


@pytest.fixture
def reply() -> Callable[..., dict[str, Any]]:
    return reply_of
