"""A router in front of fake servers, on this event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from rollfeed.config.api_key import ApiKey
from rollfeed.router.fleet import Fleet
from rollfeed.router.router_service import serve_router
from rollfeed.router.router_settings import RouterSettings, RoutingPolicy
from rollfeed.router.span_cache import SpanCache

DEADLINE_SECONDS = 60.0


class Answered(NamedTuple):
    status: int
    text: str
    headers: Any
    json: Any


class Routed:
    """A running router, asked over its socket."""

    def __init__(self, address: str, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.address = address
        self.fleet = fleet
        self._session = session

    async def ask(self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> Answered:
        sent = self._session.request(method, self.address + path, json=body, headers=headers)
        async with sent as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return Answered(response.status, text, response.headers, await response.json() if is_json else None)

    async def post(self, path: str, *, headers: dict[str, str] | None = None, **body: Any) -> Answered:
        return await self.ask("POST", path, body, headers=headers)

    async def get(self, path: str) -> Answered:
        return await self.ask("GET", path)

    async def generate(self, ids: Sequence[int] = (5, 6, 7), num_tokens: int = 4, **fields: Any) -> Answered:
        headers = fields.pop("headers", None)
        params = {"max_new_tokens": num_tokens}
        return await self.post(
            "/generate", input_ids=list(ids), sampling_params=params, return_logprob=True, headers=headers, **fields
        )

    async def workers(self) -> dict[str, dict[str, Any]]:
        return {each["url"]: each for each in (await self.get("/workers")).json["workers"]}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of the fleet, which has a minute for it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - a test looks from outside
                await asyncio.sleep(0.01)


@asynccontextmanager
async def routed(
    workers: Sequence[str], *, key: str | None = None, spans: SpanCache | None = None, **settings: Any
) -> AsyncIterator[Routed]:
    """Run a router while the block runs; its probes are quick."""
    fields = {"probe_seconds": 0.05, "probe_timeout_seconds": 20.0, "control_seconds": 20.0, **settings}
    fields["policy"] = RoutingPolicy(fields.get("policy", "prefix"))
    api_key = ApiKey("--api-key-env", "KEY", key) if key is not None else ApiKey("--api-key-env")
    timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
    headers = dict(api_key.headers)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        made = RouterSettings(**fields)
        serving = serve_router(workers, made, host="127.0.0.1", port=0, api_key=api_key, spans=spans)
        async with serving as (address, service):
            yield Routed(address, service.fleet, session)
