from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed.base.serving import serve_application
from rollfeed.testing import make_prompt as a_prompt
from rollfeed.testing import sample_of
from rollfeed.types import Prompt, Rollout, Sample, SampleStatus


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(label: Any = None, **metadata: Any) -> Prompt:
        return a_prompt("?", token_ids=np.zeros(2, np.int32), label=label, metadata=metadata)

    return make


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    def sample(rollout_id: int, response: str, status: SampleStatus, reward: Any) -> Sample:
        same = {"index": rollout_id, "rollout_id": rollout_id, "response": response}
        return sample_of([0, 0], [0], status=status, reward=reward, **same)

    def make(
        rollout_id: int, *responses: str, status: SampleStatus = SampleStatus.COMPLETED, reward: Any = None
    ) -> Rollout:
        samples = tuple(sample(rollout_id, response, status, reward) for response in responses)
        return Rollout(rollout_id=rollout_id, samples=samples)

    return make


class ScriptedServer:
    """Answers one request after the other as told, and remembers what it was sent.

    A reply has ``status`` and ``json`` or ``text``; with ``repeat`` it is the answer to all that follow. ``hang`` never
    answers, ``reset`` closes the connection.
    """

    def __init__(self, replies: Sequence[dict[str, Any]]) -> None:
        self._replies = list(replies)
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.asked = asyncio.Event()
        self.num_running = 0
        self.most_running = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.asked.set()
        reply = self._replies[0] if self._replies[0].get("repeat") else self._replies.pop(0)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(reply.get("seconds", 0))
            if reply.get("hang"):
                await asyncio.Event().wait()
        finally:
            self.num_running -= 1
        if reply.get("reset"):
            assert request.transport is not None
            request.transport.abort()
        headers = reply.get("headers", {})
        if "text" in reply:
            return web.Response(status=reply.get("status", 200), text=reply["text"], headers=headers)
        return web.json_response(reply.get("json", {}), status=reply.get("status", 200), headers=headers)


@pytest.fixture
def serve_script() -> Callable[..., Any]:
    """Return the context manager that runs a :class:`ScriptedServer`."""

    @asynccontextmanager
    async def serve(replies: Sequence[dict[str, Any]]) -> AsyncIterator[ScriptedServer]:
        server = ScriptedServer(replies)
        application = web.Application()
        application.add_routes([web.post("/{path:.*}", server.handle)])
        async with serve_application(application, host="127.0.0.1", port=0) as address:
            server.url = f"{address}/"
            yield server

    return serve
