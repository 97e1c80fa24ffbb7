"""The endpoints that OpenAI clients use."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from rollfeed.engine.server.generating import progress
from rollfeed.engine.server.openai import OpenAICall, chunk, logprobs_of, parse_call, usage_of, whole_reply
from rollfeed.engine.server.replies import settled_text
from rollfeed.engine.server.service import Answer, Service
from rollfeed.engine.server.wire import EventStream, error_body, json_reply, read_json
from rollfeed.errors import EngineError


class OpenAIHandlers:
    """Completions, chat and the list of models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
        ]

    async def models(self, _request: web.Request) -> web.Response:
        """List the one model."""
        model = {
            "id": self._service.model.name,
            "object": "model",
            "created": self._service.model.created,
            "owned_by": "rollfeed",
            "root": self._service.model.name,
            "parent": None,
            "max_model_len": self._service.engine.context_length,
        }
        return await json_reply({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue text or tokens."""
        return await self._answer(request, is_chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer messages."""
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        service = self._service
        body = await read_json(request)
        body.setdefault("model", service.model.name)
        call = await asyncio.to_thread(
            parse_call,
            body,
            is_chat=is_chat,
            tokenizer=service.tokenizer,
            context_length=service.engine.context_length,
        )
        if call.stream:
            return await self._stream(request, call)
        answers = service.start(call.jobs)
        await service.wait(answers)
        completions = [answer.completion for answer in answers]
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return await json_reply(whole_reply(call, completions, service.tokenizer), num_tokens=num_tokens)

    async def _stream(self, request: web.Request, call: OpenAICall) -> web.StreamResponse:
        async with progress(self._service, call.jobs) as (answers, changes):
            events = EventStream(request)
            deltas = [_Deltas(call, index, answer, self._service) for index, answer in enumerate(answers)]
            try:
                for index in range(len(answers) if call.is_chat else 0):
                    opening = chunk(call, index, "")
                    opening["choices"][0]["delta"] = {"role": "assistant", "content": ""}
                    await events.send(opening)
                async for index in changes:
                    piece = deltas[index].next_chunk()
                    if piece is not None:
                        await events.send(piece)
                if call.include_usage:
                    usage = usage_of(call, [answer.completion for answer in answers])
                    await events.send({**call.envelope(is_chunk=True), "choices": [], "usage": usage})
            except EngineError as error:
                await events.send({"error": error_body(request, str(error), 500)})
            return await events.end()


class _Deltas:
    """What of one choice has been sent already."""

    def __init__(self, call: OpenAICall, index: int, answer: Answer, service: Service) -> None:
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
