"""Finding out, once at the start, what a server returns, and whether one can train on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.http import TryFailedError, error_message
from rollfeed.engine.openai.replies import Answer
from rollfeed.engine.openai.requests import Ask, Route, encode_ask
from rollfeed.engine.openai.transport import Transport
from rollfeed.engine.weight_versions import VersionNameError
from rollfeed.errors import EngineProtocolError, EngineUnavailableError
from rollfeed.types import SamplingParams

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_ABSENT = (404, 405, 501)
_NO_TOLERANCE = 1e-6
_TOLERANCE = 0.02
"""Between two logprobs of one token; engines that batch do not repeat themselves to the last bit."""
_PARAMS = SamplingParams(max_new_tokens=4, top_k=1, seed=1)
"""With one candidate left, its probability is 1 in the distribution sampled from, whatever the model's."""
_IDS, _LOGPROBS = "token ids", "logprobs"
_REMEDIES = {
    _IDS: "serve with vLLM 0.10.2 or later (an SGLang server goes under engine.sglang)",
    _LOGPROBS: "let the server return them, with vLLM by --max-logprobs of at least 1",
}

T = TypeVar("T")


class LogprobsOf(Enum):
    """Which distribution a server's logprobs are of."""

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
    """What answered."""

    model: str
    route: Route
    logprobs_of: LogprobsOf
    missing: tuple[str, ...]
    """What its replies do not have."""
    policy_version: int = 0
    """That its first reply named; 0 where it names none."""

    def missing_of(self, answer: Answer) -> tuple[str, ...]:
        """Return what an answer does not have, or none has of this server."""
        return self.missing or _missing(answer)


async def probe(
    transport: Transport,
    *,
    model: str | None,
    prompt_ids: NDArray[np.int32],
    context_length: int,
    exact: bool,
    stream: bool,
    timeout_seconds: float,
) -> Server:
    """Wait until the server is healthy, ask it for a few tokens, and return what it can do.

    Raises:
        EngineUnavailableError: If it is not healthy, or does not answer, in time.
        EngineProtocolError: If it cannot be used, or not with what the settings say.
    """
    last = "no answer"
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    await check_health(transport)
                    name = await _find_model(transport, model, context_length)
                    return await _find_route(transport, name, prompt_ids, exact=exact, stream=stream)
                except (EngineUnavailableError, TryFailedError) as error:
                    last = str(error)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise EngineUnavailableError(
            f"not there within startup_timeout_seconds = {timeout_seconds:g}: {last}"
        ) from None


async def check_health(transport: Transport) -> None:
    """Return when the server says that it is healthy.

    Raises:
        EngineUnavailableError: If it does not.
    """
    reply = await transport.control("GET", "/health")
    if reply.status in _ABSENT:
        reply = await transport.control("GET", "/v1/models")
    if reply.status >= 500:
        raise EngineUnavailableError(f"{transport.base_url}: not healthy: HTTP {reply.status}")


async def _find_model(transport: Transport, model: str | None, context_length: int) -> str:
    url = f"{transport.base_url}/v1/models"
    reply = await transport.control("GET", "/v1/models")
    if reply.status >= 500:
        raise EngineUnavailableError(f"{url}: HTTP {reply.status}: {error_message(reply.content)}")
    if reply.status in _ABSENT and model is not None:
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
    if isinstance(limit, int) and context_length > limit:
        raise EngineProtocolError(
            f"engine.context_length = {context_length}: {transport.base_url} takes {limit} tokens; lower it"
        )
    return name


async def _find_route(
    transport: Transport, model: str, prompt_ids: NDArray[np.int32], *, exact: bool, stream: bool
) -> Server:
    usable: list[tuple[Route, tuple[str, ...]]] = []
    refusals: list[str] = []
    for route in Route:
        ask = partial(_ask, transport, route=route, model=model, prompt_ids=prompt_ids, stream=stream)
        try:
            answer = await ask(_PARAMS if route is not Route.PLAIN else SamplingParams(max_new_tokens=4))
        except VersionNameError as error:
            raise EngineProtocolError(f"{transport.base_url}: {error}") from error
        except EngineProtocolError as error:
            refusals.append(str(error))
            continue
        missing = _missing(answer)
        if not missing:
            version = answer.version_spans[-1].policy_version if answer.version_spans else 0
            return Server(model, route, await _logprobs_of(answer, ask), (), version)
        usable.append((route, missing))
    if not usable:
        raise EngineProtocolError(f"{transport.base_url}: answers no request for tokens: {refusals[-1]}")
    route, missing = usable[0]
    lack = f"{transport.base_url}: {route.path} returns no {' and no '.join(missing)}"
    if exact:
        remedy = _REMEDIES[missing[0]]
        raise EngineProtocolError(
            f'{lack}, so that nothing can be trained on it: {remedy}, or set engine.openai.purpose = "evaluation"'
        )
    _log.warning("%s: what it samples is good for evaluation only", lack)
    return Server(model, route, LogprobsOf.SAMPLING, missing)


async def _ask(
    transport: Transport,
    params: SamplingParams,
    *,
    route: Route,
    model: str,
    prompt_ids: NDArray[np.int32],
    stream: bool,
) -> Answer:
    ask = Ask(prompt_ids=prompt_ids, params=params, num_sampled=0, request_id="rollfeed-probe")
    answer = Answer(prompt_ids=prompt_ids, max_new_tokens=params.max_new_tokens)
    body = encode_ask(ask, route=route, model=model, stream=stream)
    await transport.receive(route.path, body, answer.take)
    answer.end()
    return answer


async def _logprobs_of(first: Answer, ask: Callable[[SamplingParams], Awaitable[Answer]]) -> LogprobsOf:
    if not len(first.token_ids):
        return LogprobsOf.MODEL
    if (first.logprobs > -_NO_TOLERANCE).all():
        return LogprobsOf.SAMPLING
    flatter = await ask(replace(_PARAMS, temperature=2.0, max_new_tokens=1))
    if flatter.token_ids[:1].tolist() != first.token_ids[:1].tolist():
        return LogprobsOf.MODEL  # top_k was not heeded, or a tie: the least is claimed
    moved = abs(float(flatter.logprobs[0]) - float(first.logprobs[0]))
    return LogprobsOf.MODEL if moved < _TOLERANCE else LogprobsOf.TEMPERATURE


def _missing(answer: Answer) -> tuple[str, ...]:
    lacks = ((_IDS, answer.lacks_ids), (_LOGPROBS, answer.lacks_logprobs))
    return tuple(name for name, is_lacking in lacks if is_lacking)


def _some(names: Sequence[str] | dict[str, Any]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
