"""The web application: generation in SGLang's form, completions in OpenAI's, and how it is served and ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from aiohttp import web

from rollfeed.base.serving import serve_application
from rollfeed.base.sglang_wire import model_list
from rollfeed.engine.http.json_answers import EventStream, error_body, errors_as_json, json_reply, read_json
from rollfeed.engine.server.chats import ChatHandlers
from rollfeed.engine.server.control import ControlHandlers
from rollfeed.engine.server.openai import CompletionsCall, chunk, logprobs_of, parse_call, usage_of, whole_reply
from rollfeed.engine.server.parsing import GenerateCall, parse_generate
from rollfeed.engine.server.pictures_asked import with_pictures
from rollfeed.engine.server.replies import generate_reply, partial_reply, settled_text
from rollfeed.engine.server.service import RunningJob, Service
from rollfeed.engine.server.weight_sessions import WeightHandlers
from rollfeed.errors import EngineError

_MAX_BODY_BYTES = 1 << 28
_BYTES_OF_A_TOKEN = 8
"""In a body, at most; with :data:`_OTHER_BYTES` for what is not the prompt, and as much as there may be of pictures."""
_OTHER_BYTES = 1 << 22
_LARGE_TEXT_BYTES = 1 << 14
"""Bodies beyond this are tokenised in a thread."""


def create_application(service: Service, *, more_routes: Iterable[web.RouteDef] = ()) -> web.Application:
    """Return the application of a service whose engine is entered."""
    prompts_bytes = _BYTES_OF_A_TOKEN * service.capacity * service.engine.context_length + _OTHER_BYTES
    most = _MAX_BODY_BYTES if service.picture_input is not None else min(_MAX_BODY_BYTES, prompts_bytes)
    application = web.Application(middlewares=[errors_as_json], client_max_size=most)
    application.add_routes(more_routes)
    for handlers in (GenerateHandlers, CompletionHandlers, ChatHandlers, ControlHandlers, WeightHandlers):
        application.add_routes(handlers(service).routes())
    return application


@asynccontextmanager
async def serve(
    service: Service, *, host: str, port: int, key: str | None = None, more_routes: Iterable[web.RouteDef] = ()
) -> AsyncIterator[str]:
    """Serve while the block runs, with more endpoints; give the address, for example ``http://127.0.0.1:30000``.

    Clients bear the key, where there is one. A client that goes away aborts what it asked for. Leaving aborts
    everything, lets the partial replies out and closes all connections.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    application = create_application(service, more_routes=more_routes)
    async with serve_application(application, host=host, port=port, key=key) as address:
        try:
            yield address
        finally:
            with suppress(EngineError):
                await service.engine.abort()


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
        pictures = await with_pictures(body, service)

        def parse() -> GenerateCall:
            return parse_generate(
                body,
                tokenizer=service.tokenizer,
                context_length=service.engine.context_length,
                most_jobs=service.capacity,
            )

        is_large = body.get("text") is not None and (request.content_length or math.inf) > _LARGE_TEXT_BYTES
        call = await asyncio.to_thread(parse) if is_large else parse()
        if pictures:
            looked_at = await service.engine.look(call.jobs[0].token_ids, pictures)
            call = replace(call, jobs=[replace(job, pictures=looked_at) for job in call.jobs])
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
        async with service.progress(call.jobs) as (answers, changes):
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
            return await events.end(b"data: [DONE]\n\n")


class CompletionHandlers:
    """Completions of texts, and the list of models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        return [web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)]

    async def models(self, _request: web.Request) -> web.Response:
        """List the one model."""
        model, length = self._service.model, self._service.engine.context_length
        listed = model_list(
            name=model.name, created=model.created, owner="rollfeed", context_length=length, parent=None
        )
        return await json_reply(listed)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue text or tokens."""
        service = self._service
        body = await read_json(request)
        body.setdefault("model", service.model.name)
        call = await asyncio.to_thread(
            parse_call,
            body,
            tokenizer=service.tokenizer,
            context_length=service.engine.context_length,
            most_jobs=service.capacity,
        )
        if call.stream:
            return await self._stream(request, call)
        answers = service.start(call.jobs)
        await service.wait(answers)
        completions = [answer.completion for answer in answers]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return await json_reply(whole_reply(call, completions, service.tokenizer), num_tokens=num_tokens)

    async def _stream(self, request: web.Request, call: CompletionsCall) -> web.StreamResponse:
        async with self._service.progress(call.jobs) as (answers, changes):
            events = EventStream(request)
            deltas = [_Deltas(call, index, answer, self._service) for index, answer in enumerate(answers)]
            try:
                async for index in changes:
                    piece = deltas[index].next_chunk()
                    if piece is not None:
                        await events.send(piece)
                if call.include_usage:
                    usage = usage_of(call, [answer.completion for answer in answers])
                    await events.send({**call.envelope(), "choices": [], "usage": usage})
            except EngineError as error:
                await events.send({"error": error_body(request, str(error), 500)})
            return await events.end(b"data: [DONE]\n\n")


class _Deltas:
    """What of one choice has been sent already."""

    def __init__(self, call: CompletionsCall, index: int, answer: RunningJob, service: Service) -> None:
        self._call = call
        self._index = index
        self._answer = answer
        self._tokenizer = service.tokenizer
        self._num_tokens = 0
        self._text = ""

    def next_chunk(self) -> dict[str, Any] | None:
        """Return what is new; None while it may still change."""
        answer, request = self._answer, self._answer.request
        completion = answer.completion if answer.task.done() else None
        num_tokens = request.num_published if completion is None else len(completion.token_ids)
        token_ids, logprobs = request.token_ids[:num_tokens], request.logprobs[:num_tokens]
        params = answer.job.params
        text = settled_text(token_ids, params, self._tokenizer) if completion is None else completion.text
        delta = text[len(self._text) :]
        if not delta and completion is None:
            return None
        new = slice(self._num_tokens, num_tokens)
        scores = logprobs_of(self._call, token_ids[new], logprobs[new], self._tokenizer)
        self._text, self._num_tokens = text, num_tokens
        return chunk(self._call, self._index, delta, logprobs=scores, completion=completion)
