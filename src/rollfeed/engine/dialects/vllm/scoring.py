"""Log-probabilities of texts that are given to a server, by vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.dialects.vllm.probing import Server
from rollfeed.engine.dialects.vllm.requests import Route
from rollfeed.engine.http import Http
from rollfeed.errors import EngineProtocolError, EngineUnavailableError

_PARAMETERS = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
_AT_ONCE = 8


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


_Prompt = list[dict[str, _Logprob] | None]


class _Choice(msgspec.Struct, gc=False):
    prompt_logprobs: _Prompt | None = None


class _Reply(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    prompt_logprobs: _Prompt | None = None
    """Beside the choices on the route for tokens."""


_DECODER = msgspec.json.Decoder(_Reply)


async def score_texts(
    address: str, server: Server, texts: Sequence[NDArray[np.int32]], *, http: Http, timeout_seconds: float
) -> NDArray[np.float64] | None:
    """Return the log-probabilities of all tokens but the first of each text, under the server's present weights.

    None is what a server gives that does not score prompts.

    Raises:
        EngineUnavailableError: If it does not answer in time.
        EngineProtocolError: If its reply breaks the contract.
    """
    slots = asyncio.Semaphore(_AT_ONCE)

    async def score(text: NDArray[np.int32]) -> list[float] | None:
        async with slots:
            return await _score(address, server, text.tolist(), http=http, timeout_seconds=timeout_seconds)

    scored = await asyncio.gather(*(score(text) for text in texts))
    if any(logprobs is None for logprobs in scored):
        return None
    return np.concatenate([np.array(logprobs, np.float64) for logprobs in scored])


async def _score(
    address: str, server: Server, token_ids: list[int], *, http: Http, timeout_seconds: float
) -> list[float] | None:
    url = f"{address}{server.route.path}"
    reply = await http.control("POST", url, _body(server, token_ids), timeout_seconds=timeout_seconds)
    if reply.status >= 500:
        raise EngineUnavailableError(f"{url}: {reply.error}")
    if reply.status != 200:
        return None
    try:
        answer = _DECODER.decode(reply.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineProtocolError(f"{url}: prompt_logprobs: {error}") from error
    prompt = answer.prompt_logprobs or next((choice.prompt_logprobs for choice in answer.choices), None)
    if prompt is None:
        return None
    found = [None if each is None else each.get(str(token)) for each, token in zip(prompt, token_ids, strict=False)]
    known = [each.logprob for each in found[1:] if each is not None]
    if len(known) != len(token_ids) - 1 or len(prompt) != len(token_ids):
        raise EngineProtocolError(f"{url}: it scored other tokens than it was sent")
    return known


def _body(server: Server, token_ids: list[int]) -> dict[str, Any]:
    # Keys and values of earlier weights are kept from it, though a server that scores does not look for any.
    common = {"model": server.model, "stream": False, "cache_salt": secrets.token_hex(16)}
    if server.route is Route.TOKENS:
        return {**common, "token_ids": token_ids, "sampling_params": _PARAMETERS}
    return {**common, "prompt": token_ids, **_PARAMETERS}
