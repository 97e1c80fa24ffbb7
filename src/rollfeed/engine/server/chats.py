"""The endpoints that answer conversations, in OpenAI's forms and Anthropic's, on one way through the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollfeed.base.sglang_wire import check_id_length, check_num_responses
from rollfeed.chat_apis import (
    CHAT_APIS,
    AnthropicMessages,
    ApiError,
    Asked,
    ChatApi,
    ErrorKind,
    OpenAIChat,
    Said,
    TokenLogprob,
    call_openings,
    next_call,
    opens_thought,
    said_of,
    said_so_far,
    token_logprobs,
)
from rollfeed.chat_apis.shown_pictures import load_pictures
from rollfeed.conversations import call_syntax
from rollfeed.engine.http.json_answers import EventStream, json_reply, read_json
from rollfeed.engine.server.parsing import make_jobs, parse_sampling
from rollfeed.engine.server.replies import settled_text
from rollfeed.engine.server.service import RunningJob, ServerJob, Service
from rollfeed.errors import EngineError
from rollfeed.protocols import CallFormat, Tokenizer
from rollfeed.types import Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatCall:
    api: ChatApi
    asked: Asked
    call_format: CallFormat
    prompt_ids: NDArray[np.int32]
    in_thought: bool
    """Whether the prompt ends with the opening of a thought."""
    jobs: Sequence[ServerJob]
    reply_id: str
    created: int

    def said(self, answer: RunningJob, tokenizer: Tokenizer) -> Said:
        return said_of(
            answer.completion,
            self.asked,
            tokenizer,
            self.call_format,
            in_thought=self.in_thought,
            tops=answer.request.tops_R,
            first_call=next_call(self.asked.messages),
        )


class ChatHandlers:
    """Chat completions, responses and messages; the tokens of messages counted."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoints."""
        answering = [web.post(path, partial(self.answer, api)) for path, api in CHAT_APIS.items()]
        return [*answering, web.post(AnthropicMessages.count_path, self.count)]

    async def count(self, request: web.Request) -> web.Response:
        """Count the tokens of messages."""
        body, api = await read_json(request), AnthropicMessages()
        asked, pictures = await self._seen(api.read_count(body))
        _, prompt_ids = await asyncio.to_thread(self._prompt, asked, pictures)
        return await json_reply(api.count(len(prompt_ids)))

    async def answer(self, api: ChatApi, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        call = await self._call(api, await read_json(request))
        if call.asked.stream:
            return await self._stream(request, call)
        answers = self._service.start(call.jobs)
        await self._service.wait(answers)
        said = [call.said(answer, self._service.tokenizer) for answer in answers]
        reply = api.reply(call.asked, said, reply_id=call.reply_id, created=call.created)
        response = await json_reply(reply, num_tokens=sum(each.completion_tokens for each in said))
        response.headers.update(call.asked.headers)
        return response

    async def _stream(self, request: web.Request, call: _ChatCall) -> web.StreamResponse:
        tokenizer = self._service.tokenizer
        async with self._service.progress(call.jobs) as (answers, changes):
            stream = EventStream(request, headers=call.asked.headers)
            events = call.api.events(call.asked, reply_id=call.reply_id, created=call.created)
            told = [_Told(call, answer, tokenizer) for answer in answers]
            said: dict[int, Said] = {}
            try:
                await stream.write(events.opening(prompt_tokens=len(call.prompt_ids)))
                async for index in changes:
                    if answers[index].task.done():
                        said[index] = call.said(answers[index], tokenizer)
                        news = events.finished(index, said[index])
                    else:
                        news = events.progress(index, *told[index].so_far())
                    if news:
                        await stream.write(news)
                await stream.write(events.ending([said[index] for index in range(len(answers))]))
            except EngineError as error:
                await stream.write(events.failure(ApiError(str(error), kind=ErrorKind.API_ERROR)))
            return await stream.end()

    async def _call(self, api: ChatApi, body: dict[str, Any]) -> _ChatCall:
        """Return the call that a body is."""
        asked, pictures = await self._seen(await asyncio.to_thread(api.read, body))
        call = await asyncio.to_thread(self._read, api, body, asked, pictures)
        if not pictures:
            return call
        looked = await self._service.engine.look(call.prompt_ids, pictures)
        return replace(call, jobs=[replace(job, pictures=looked) for job in call.jobs])

    async def _seen(self, asked: Asked) -> tuple[Asked, tuple[Picture, ...]]:
        """Return a request with its pictures."""
        messages, pictures = await load_pictures(asked.messages, self._service.picture_input)
        return replace(asked, messages=messages), pictures

    def _read(self, api: ChatApi, body: dict[str, Any], asked: Asked, pictures: tuple[Picture, ...]) -> _ChatCall:
        if asked.previous_response_id is not None:
            raise ApiError(
                "responses are not kept here: send the whole conversation as input", param="previous_response_id"
            )
        asked = replace(asked, model=asked.model or self._service.model.name)
        context_length = self._service.engine.context_length
        call_format, prompt_ids = self._prompt(asked, pictures)
        room = context_length - len(prompt_ids)
        if room < 1:
            raise ApiError.too_long(len(prompt_ids), context_length)
        limit = room if asked.max_new_tokens is None else asked.max_new_tokens
        if not isinstance(api, OpenAIChat):
            limit = min(limit, room)  # agents ask for as much as models of others have
        given = {
            "max_new_tokens": limit,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "stop": asked.stop,
            "sampling_seed": asked.seed,
            "n": asked.num_choices,
            **asked.further,
        }
        sampling = parse_sampling(given, prompt_tokens=len(prompt_ids), context_length=context_length)
        check_num_responses(sampling.num_samples, self._service.capacity)
        rid = body["rid"] if isinstance(body.get("rid"), str) and body["rid"] else api.new_id()
        check_id_length(rid)
        jobs = make_jobs(prompt_ids, sampling, rid=rid, return_logprob=True)
        return _ChatCall(
            api=api,
            asked=asked,
            call_format=call_format,
            prompt_ids=prompt_ids,
            in_thought=opens_thought(prompt_ids, self._service.tokenizer),
            jobs=[replace(job, num_tops=asked.num_tops) for job in jobs],
            reply_id=rid,
            created=int(time.time()),
        )

    def _prompt(self, asked: Asked, pictures: tuple[Picture, ...]) -> tuple[CallFormat, NDArray[np.int32]]:
        """Return how calls are written, and the tokens of a conversation, ``(P,)``."""
        asked.check_length(self._service.engine.context_length)
        tokenizer = self._service.tokenizer
        syntax = call_syntax(tokenizer, CallFormat.AUTO)
        messages = syntax.introduced(syntax.adapted(asked.messages), asked.tools)
        text = tokenizer.render_chat(
            messages, tools=asked.tools or None, template_kwargs=asked.template_kwargs, num_images=len(pictures)
        )
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        seeing = self._service.picture_input
        if pictures and seeing is not None and seeing.pictures is not None:
            try:
                prompt_ids = seeing.pictures.expand(prompt_ids, pictures)
            except ValueError as error:
                raise ApiError(f"the chat template and the pictures do not fit: {error}", param="messages") from error
        return syntax.call_format, prompt_ids


class _Told:
    """A choice that is under way."""

    def __init__(self, call: _ChatCall, answer: RunningJob, tokenizer: Tokenizer) -> None:
        self._call = call
        self._answer = answer
        self._tokenizer = tokenizer
        self._openings = call_openings(call.asked, call.call_format)
        self._num_tokens = 0

    def so_far(self) -> tuple[str, str, Sequence[TokenLogprob]]:
        """Return thought and content so far, and the log-probabilities of tokens that were not told of before."""
        request, params = self._answer.request, self._answer.job.params
        num_tokens = request.num_published
        token_ids, logprobs = request.token_ids[:num_tokens], request.logprobs[:num_tokens]
        text = settled_text(token_ids, params, self._tokenizer)
        new = slice(self._num_tokens, num_tokens)
        self._num_tokens = num_tokens
        wanted = self._call.asked.with_logprobs
        tops = request.tops_R[new]
        scores = token_logprobs(token_ids[new], logprobs[new], self._tokenizer, tops) if wanted else ()
        return *said_so_far(text, self._openings, in_thought=self._call.in_thought), scores
