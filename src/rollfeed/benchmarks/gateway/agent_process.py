"""The agents of ``rollfeed bench gateway``: a process that holds many conversations at once."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import msgspec

from rollfeed.benchmarks.gateway.talks import Api, begin_talk


class AgentsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations through a gateway; then the same bodies through a server that echoes."""

    address: str
    echo: str
    api: Api
    num_sessions: int
    num_turns: int
    in_flight: int
    """Conversations at once."""
    system: str
    """The system message of all."""
    source: str
    """A text whose parts the tool gives back."""
    part: int
    """Characters of a part."""

    def answer(self, session: int, number: int) -> str:
        """Return what the tool gives back."""
        start = (session * 7919 + number * self.part) % (len(self.source) - self.part)
        return self.source[start : start + self.part]


def main() -> None:
    """Do the job in the standard input."""
    asyncio.run(_hold(msgspec.json.decode(sys.stdin.buffer.read(), type=AgentsJob)))


async def _hold(job: AgentsJob) -> None:
    permits, bodies = asyncio.Semaphore(job.in_flight), list[bytes]()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def post(url: str, body: bytes, key: str = "") -> bytes:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            async with permits, http.post(url, data=body, headers=headers) as response:
                content = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{url}: {response.status}: {content[:500].decode(errors='replace')}")
                return content

        async def converse(number: int) -> None:
            session: Any = msgspec.json.decode(await post(f"{job.address}/sessions", b"{}"))
            talk = begin_talk(job.api, job.system, f"Question {number}: read the parts.")
            for _ in range(job.num_turns):
                bodies.append(msgspec.json.encode(talk.body(stream=True)))
                content = await post(f"{job.address}/v1/{job.api}", bodies[-1], session["key"])
                talk.take(talk.read(content, stream=True), lambda asked: job.answer(number, asked["number"]))
            await post(f"{job.address}/sessions/{session['id']}/finish", b"{}")

        async with asyncio.TaskGroup() as group:
            for number in range(job.num_sessions):
                group.create_task(converse(number))
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(post(job.echo, body))
