"""``/generate``, whole or as a stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from rollfeed.engine.server.parsing import GenerateCall, parse_generate
from rollfeed.engine.server.replies import generate_reply, partial_reply
from rollfeed.engine.server.service import Answer, Service
from rollfeed.engine.server.state import Job
from rollfeed.engine.server.wire import EventStream, error_body, json_reply, read_json
from rollfeed.errors import EngineError

_LARGE_TEXT_BYTES = 1 << 14
"""Bodies beyond this are tokenised in a thread."""


class GenerateHandlers:
    """The endpoints that speak SGLang's own form."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        return [web.post("/generate", self.generate), web.put("/generate", self.generate)]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Sample responses; the client's leaving aborts them."""
        body = await read_json(request)
        service = self._service

        def parse() -> GenerateCall:
            return parse_generate(body, tokenizer=service.tokenizer, context_length=service.engine.context_length)

        is_large = body.get("text") is not None and (request.content_length or math.inf) > _LARGE_TEXT_BYTES
        call = await asyncio.to_thread(parse) if is_large else parse()
        if call.stream:
            return await self._stream(request, call)
        answers = service.start(call.jobs)
        await service.wait(answers)
        replies = [
            generate_reply(answer, weight_version=service.weight_version, versions=service.versions)
            for answer in answers
        ]
        num_tokens = sum(answer.request.num_tokens for answer in answers)
        return await json_reply(replies[0] if call.is_single else replies, num_tokens=num_tokens)

    async def _stream(self, request: web.Request, call: GenerateCall) -> web.StreamResponse:
        service = self._service
        async with progress(service, call.jobs) as (answers, changes):
            events = EventStream(request)
            try:
                async for index in changes:
                    answer = answers[index]
                    if answer.task.done():
                        reply = generate_reply(answer, weight_version=service.weight_version, versions=service.versions)
                    else:
                        reply = partial_reply(
                            answer, weight_version=service.weight_version, tokenizer=service.tokenizer
                        )
                    await events.send(reply if call.is_single else {**reply, "index": index})
            except EngineError as error:
                await events.send(error_body(request, str(error), 500))
            return await events.end()


@asynccontextmanager
async def progress(service: Service, jobs: Sequence[Job]) -> AsyncIterator[tuple[list[Answer], AsyncIterator[int]]]:
    """Run jobs; give the answers, and the index of an answer whenever it has more tokens or has ended.

    Tokens that come while the client is slow are told together. Leaving drops what still runs.
    """
    changed = asyncio.Event()
    answers = service.start(jobs, on_progress=changed.set)
    try:
        yield answers, _changes(answers, changed)
    finally:
        service.drop(answers)


async def _changes(answers: Sequence[Answer], changed: asyncio.Event) -> AsyncIterator[int]:
    seen = [0] * len(answers)
    left = set(range(len(answers)))
    while left:
        await changed.wait()
        changed.clear()
        for index in sorted(left):
            answer = answers[index]
            if answer.task.done():
                left.discard(index)
                yield index
            elif answer.request.num_published > seen[index]:
                seen[index] = answer.request.num_published
                yield index
