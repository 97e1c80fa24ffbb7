from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollfeed.base.serving import serve_application
from rollfeed.config import JudgeSettings

Says = Callable[[str], Any]


class JudgeServer:
    """A chat endpoint whose model says what a function makes of the last message.

    The function returns the content, or further parts of a reply: ``call`` (the arguments of a call of ``verdict``),
    ``tops`` (a list of tokens, each with its alternatives' logprobs), ``finish``; or ``status`` with ``text`` and
    ``headers`` instead of one; it may be awaitable.
    """

    def __init__(self, says: Says) -> None:
        self.says = says
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.url = ""

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.times.append(asyncio.get_running_loop().time())
        said = self.says(body["messages"][-1]["content"])
        said = await said if isinstance(said, Awaitable) else said
        reply = said if isinstance(said, dict) else {"content": said}
        if "text" in reply:
            return web.Response(status=reply.get("status", 200), text=reply["text"], headers=reply.get("headers"))
        return web.json_response(completion(reply))


def completion(reply: dict[str, Any]) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "verdict", "arguments": reply.get("call", "")}}]
    logprobs = [
        {"token": token, "logprob": 0.0, "top_logprobs": [{"token": each, "logprob": p} for each, p in tops.items()]}
        for token, tops in reply.get("tops", ())
    ]
    message = {"role": "assistant", "content": reply.get("content")} | (
        {"tool_calls": calls} if "call" in reply else {}
    )
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reply.get("finish", "stop"),
        "logprobs": {"content": logprobs} if "tops" in reply else None,
    }
    return {"choices": [choice], "usage": {"prompt_tokens": 20, "completion_tokens": 5}}


@asynccontextmanager
async def judge_server(says: Says) -> AsyncIterator[JudgeServer]:
    """Run a :class:`JudgeServer`."""
    server, application = JudgeServer(says), web.Application()
    application.add_routes([web.post("/v1/chat/completions", server.handle)])
    async with serve_application(application, host="127.0.0.1", port=0) as address:
        server.url = f"{address}/v1"
        yield server


@pytest.fixture
def serve_judge() -> Callable[..., Any]:
    """Return :func:`judge_server`."""
    return judge_server


@pytest.fixture
def judge_settings() -> Callable[..., JudgeSettings]:
    def make(*urls: str, **settings: Any) -> JudgeSettings:
        rubrics = {"pairwise": "{prompt}: {response_a} or {response_b}?", "listwise": "{prompt}: {responses}"}
        rubric = rubrics.get(settings.get("mode", ""), "Q {prompt} A {response}")
        given = {"servers": urls or ["http://127.0.0.1:9/v1"], "model": "judge", "rubric": rubric, "instruction": ""}
        return JudgeSettings.model_validate(given | settings)

    return make
