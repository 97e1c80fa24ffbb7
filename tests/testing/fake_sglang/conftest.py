"""A plain client, without retries and without a memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest


class PlainClient:
    """Asks a server over real sockets."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, address: str, *, status: int = 200) -> Any:
        async with self.session.get(address) as response:
            return await self._content(response, status)

    async def post(self, address: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.session.post(address, json={} if body is None else body) as response:
            return await self._content(response, status)

    async def generate(self, address: str, *, status: int = 200, top: Any = None, **sampling: Any) -> Any:
        body = {"input_ids": [3, 1, 2], "sampling_params": sampling, "return_logprob": True, **(top or {})}
        return await self.post(address + "/generate", body, status=status)

    async def events(self, address: str, *, top: Any = None, **sampling: Any) -> list[Any]:
        """The JSON values of a stream, which must end as it should."""
        body = {"input_ids": [3, 1, 2], "sampling_params": sampling, "return_logprob": True, **(top or {})}
        async with self.session.post(address + "/generate", json={**body, "stream": True}) as response:
            assert response.content_type == "text/event-stream", await response.text()
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def _content(self, response: aiohttp.ClientResponse, status: int) -> Any:
        text = await response.text()
        assert response.status == status, text
        return json.loads(text) if response.content_type == "application/json" else text


@asynccontextmanager
async def plain_client() -> AsyncIterator[PlainClient]:
    """Be a client on the running loop."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield PlainClient(session)


@pytest.fixture
async def client() -> AsyncIterator[PlainClient]:
    async with plain_client() as made:
        yield made
