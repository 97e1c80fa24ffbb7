"""A gateway over a scripted engine, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rollfeed.base.serving import serve_application
from rollfeed.gateway.gateway_server import GatewayServer
from rollfeed.gateway.policy import Caps, ServedPolicy
from rollfeed.gateway.session_journal import FolderJournal
from rollfeed.gateway.sessions import Sessions
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.types import SamplingParams

TOKEN = "operator"


@dataclass
class Client:
    """Speaks to a gateway as operators and agents do."""

    http: aiohttp.ClientSession
    address: str
    sessions: Sessions
    engine: ScriptedEngine

    async def operate(self, method: str, path: str, body: Any = None, *, token: str = TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.http.request(method, self.address + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def open(self, **about: Any) -> dict[str, Any]:
        status, opened = await self.operate("POST", "/sessions", about)
        assert status == 200, opened
        return opened  # type: ignore[no-any-return]

    async def finish(self, opened: dict[str, Any], **about: Any) -> list[dict[str, Any]]:
        status, finished = await self.operate("POST", f"/sessions/{opened['id']}/finish", about)
        assert status == 200, finished
        return finished["samples"]  # type: ignore[no-any-return]

    async def chat(self, opened: dict[str, Any], messages: Any, *, headers: Any = None, **others: Any) -> Any:
        """Return the reply, or the status where that is not 200."""
        status, reply = await self.ask(opened["key"], {"messages": messages, **others}, headers=headers)
        return reply if status == 200 else status

    async def ask(self, key: str, body: Any, *, headers: Any = None) -> tuple[int, Any]:
        told = {"Authorization": f"Bearer {key}", **(headers or {})} if key else headers
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(f"{self.address}/v1/chat/completions", headers=told, **sent) as response:
            return response.status, await response.json()

    def count(self, name: str) -> int:
        totals = self.sessions.totals
        return totals.counts[name] or totals.refused[name]


def said(reply: Any) -> str:
    return reply["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


@asynccontextmanager
async def gateway(
    engine: ScriptedEngine | None = None,
    *,
    caps: Caps | None = None,
    folder: Path | None = None,
    context_length: int = 10_000,
    silent_seconds: float = 60.0,
    reading_seconds: float = 60.0,
    **others: Any,
) -> AsyncIterator[Client]:
    engine = engine or ScriptedEngine()
    policy = ServedPolicy(
        tokenizer=CharTokenizer(),
        context_length=context_length,
        params=SamplingParams(max_new_tokens=context_length),
        models=("policy",),
    )
    journal = None if folder is None else FolderJournal(folder)
    sessions = Sessions(policy, engine, caps=caps or Caps(), journal=journal, **others)
    application = GatewayServer(sessions, token=TOKEN, reading_seconds=reading_seconds).application()
    try:
        serving = serve_application(application, host="127.0.0.1", port=0, silent_seconds=silent_seconds)
        async with engine, serving as address, aiohttp.ClientSession() as http:
            yield Client(http, address, sessions, engine)
    finally:
        sessions.journal.close()
