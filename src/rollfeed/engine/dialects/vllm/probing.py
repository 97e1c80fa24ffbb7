"""Finding out, once at the start, what a server returns, and whether one can train on it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rollfeed.config.engine import OpenAISettings, Purpose
from rollfeed.engine.client.dialect import Context
from rollfeed.engine.client.flights import Flight
from rollfeed.engine.client.replies import Reply
from rollfeed.engine.client.versions import VersionNameError
from rollfeed.engine.dialects.vllm.replies import IDS, LOGPROBS, VLLMAnswer
from rollfeed.engine.dialects.vllm.requests import Route, encode_request
from rollfeed.engine.http import Http, TryFailedError
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import SamplingParams

_log = logging.getLogger(__name__)

ABSENT = (404, 405, 501)
"""Statuses of routes that a server does not have."""
_TEXT, _NAME = "The", "rollfeed-probe"
_NO_TOLERANCE = 1e-6
_TOLERANCE = 0.02
"""Between two logprobs of one token; engines that batch do not repeat themselves to the last bit."""
_PARAMS = SamplingParams(max_new_tokens=4, top_k=1, seed=1)
"""With one candidate left, its probability is 1 in the distribution sampled from, whatever the model's."""
_REMEDIES = {
    IDS: "serve with vLLM 0.10.2 or later (an SGLang server goes under engine.sglang)",
    LOGPROBS: "let the server return them, with vLLM by --max-logprobs of at least 1",
}


class LogprobsOf(Enum):
    """The distribution that a server's logprobs are of."""

    SAMPLING = "the distribution sampled from"
    TEMPERATURE = "the model's distribution after temperature"
    MODEL = "the model's own distribution"

    def hides(self, params: SamplingParams) -> str | None:
        """Return the name of a parameter whose effect such logprobs do not show, if there is one.

        A greedy response has no distribution to be of.
        """
        if self is LogprobsOf.SAMPLING or params.temperature == 0.0:
            return None
        neutral = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "min_new_tokens": 0}
        if self is LogprobsOf.MODEL:
            neutral["temperature"] = 1.0
        return next((name for name, value in neutral.items() if getattr(params, name) != value), None)


class Server(NamedTuple):
    """A server that answers at an address, and what it can do."""

    model: str
    route: Route
    logprobs_of: LogprobsOf
    lacks: tuple[str, ...]
    """What its replies do not have."""
    policy_version: int | None = None
    """That its first reply named; None where it names none."""
    names_versions: bool = False
    """Whether it keeps a name for its version, and is told it."""
    returns_experts: bool = False


async def probe(address: str, *, settings: OpenAISettings, context: Context) -> Server:
    """Ask a server for a few tokens, and return what it can do.

    Raises:
        EngineUnavailableError: If it does not answer.
        EngineProtocolError: If it cannot be used, or not with what the settings say.
    """
    name = await _find_model(address, settings.model, context)
    try:
        return await _find_route(address, name, settings=settings, context=context)
    except TryFailedError as error:
        raise EngineUnavailableError(str(error)) from error


async def check_health(address: str, *, http: Http, timeout_seconds: float) -> None:
    """Return when the server says that it is healthy. Raises EngineUnavailableError if it does not."""
    reply = await http.control("GET", f"{address}/health", timeout_seconds=timeout_seconds)
    if reply.status in ABSENT:
        reply = await http.control("GET", f"{address}/v1/models", timeout_seconds=timeout_seconds)
    if reply.status >= 500:
        raise EngineUnavailableError(f"{address}: not healthy: HTTP {reply.status}")


async def _find_model(address: str, model: str | None, context: Context) -> str:
    url = f"{address}/v1/models"
    reply = await context.http.control("GET", url)
    if reply.status >= 500:
        raise EngineUnavailableError(f"{url}: {reply.error}")
    if reply.status in ABSENT and model is not None:
        return model
    told = reply.json().get("data")
    cards: dict[str, dict[str, Any]] = {}
    for card in told if isinstance(told, list) else ():
        if isinstance(card, dict) and isinstance(card.get("id"), str):
            cards[card["id"]] = card
    if not cards:
        raise EngineProtocolError(f"{url}: HTTP {reply.status}, and no list of models: not an OpenAI-style server")
    if model is None and len(cards) > 1:
        raise EngineProtocolError(f"{url}: lists {len(cards)} models, set engine.openai.model to one of {_some(cards)}")
    name = next(iter(cards)) if model is None else model
    if name not in cards:
        raise EngineProtocolError(f"engine.openai.model = {name!r}: the server has {_some(cards)}")
    limit = cards[name].get("max_model_len")
    if isinstance(limit, int) and context.context_length > limit:
        raise EngineProtocolError(
            f"engine.context_length = {context.context_length}: {address} takes {limit} tokens; lower it"
        )
    return name


async def _find_route(address: str, model: str, *, settings: OpenAISettings, context: Context) -> Server:
    usable: list[tuple[Route, tuple[str, ...]]] = []
    refusals: list[str] = []
    for route in Route:
        ask = partial(_ask, address, route=route, model=model, stream=settings.stream, context=context)
        try:
            answer = await ask(_PARAMS if route is not Route.PLAIN else SamplingParams(max_new_tokens=4))
            lacks, reply = answer.lacks, answer.reply()
        except VersionNameError as error:
            raise EngineProtocolError(f"{address}: {error}") from error
        except EngineProtocolError as error:
            refusals.append(str(error))
            continue
        if not lacks:
            logprobs_of, has_experts = await _logprobs_of(reply, ask), answer.has_experts
            return Server(model, route, logprobs_of, (), reply.policy_version, returns_experts=has_experts)
        usable.append((route, lacks))
    if not usable:
        raise EngineProtocolError(f"{address}: answers no request for tokens: {refusals[-1]}")
    route, lacks = usable[0]
    lack = f"{address}: {route.path} returns no {' and no '.join(lacks)}"
    if settings.purpose is Purpose.TRAINING:
        remedy = _REMEDIES[lacks[0]]
        raise EngineProtocolError(
            f'{lack}, so that nothing can be trained on it: {remedy}, or set engine.openai.purpose = "evaluation"'
        )
    _log.warning("%s: what it samples is good for evaluation only", lack)
    return Server(model, route, LogprobsOf.SAMPLING, lacks)


async def _ask(
    address: str, params: SamplingParams, *, route: Route, model: str, stream: bool, context: Context
) -> VLLMAnswer:
    tokenizer = context.tokenizer
    prompt_ids = np.asarray(tokenizer.encode(_TEXT, add_special_tokens=False), np.int32)
    flight = Flight(request_id=_NAME, prompt_ids=prompt_ids, params=params)
    flight.rid = _NAME
    answer = VLLMAnswer(prompt_ids=prompt_ids, max_new_tokens=params.max_new_tokens, exact=False, tokenizer=tokenizer)
    body = encode_request(flight, route=route, model=model, stream=stream)
    content = await context.http.generate(address, route.path, body, events=answer.take)
    if content is not None:
        answer.take(content)
    return answer


async def _logprobs_of(first: Reply, ask: Callable[[SamplingParams], Awaitable[VLLMAnswer]]) -> LogprobsOf:
    if not len(first.token_ids):
        return LogprobsOf.MODEL
    if (first.logprobs > -_NO_TOLERANCE).all():
        return LogprobsOf.SAMPLING
    flatter = (await ask(replace(_PARAMS, temperature=2.0, max_new_tokens=1))).reply()
    if flatter.token_ids[:1].tolist() != first.token_ids[:1].tolist():
        return LogprobsOf.MODEL  # top_k was not heeded, or a tie: the least is claimed
    moved = abs(float(flatter.logprobs[0]) - float(first.logprobs[0]))
    return LogprobsOf.MODEL if moved < _TOLERANCE else LogprobsOf.TEMPERATURE


def _some(names: Sequence[str] | dict[str, Any]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
