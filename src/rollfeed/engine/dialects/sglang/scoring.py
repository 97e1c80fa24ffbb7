"""Log-probabilities of texts that are given to a server."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.client.versions import version_number
from rollfeed.engine.http import Http
from rollfeed.errors import EngineProtocolError, EngineUnavailableError

_TRIES = 5
"""An abort of everything, as at the end of a step or by somebody else, ends these requests too."""
_ASK = {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True, "logprob_start_len": 0}
"""From the first token on: a server that scores takes no keys and values from its cache for what it scores."""


class _Scored(msgspec.Struct, array_like=True, gc=False):
    """The head of ``[logprob, token_id, text]``."""

    logprob: float | None
    token_id: int


class _Finish(msgspec.Struct, gc=False):
    type: str


class _Meta(msgspec.Struct, gc=False):
    input_token_logprobs: list[_Scored] | None = None
    weight_version: str | int | None = None
    finish_reason: _Finish | None = None


class _Reply(msgspec.Struct, gc=False):
    meta_info: _Meta


_DECODER = msgspec.json.Decoder(list[_Reply])


async def score_texts(
    address: str,
    texts: Sequence[NDArray[np.int32]],
    *,
    policy_version: int,
    adapter: str | None = None,
    http: Http,
    timeout_seconds: float,
) -> NDArray[np.float64]:
    """Return the log-probabilities of all tokens but the first of each text, under a server's weights and adapter.

    Raises:
        EngineUnavailableError: If it does not answer in time.
        EngineProtocolError: If its reply breaks the contract, or is of another version.
    """
    url = f"{address}/generate"
    body = {"input_ids": [text.tolist() for text in texts], **_ASK, **({"lora_path": adapter} if adapter else {})}
    for _ in range(_TRIES):
        content = (await http.command(url, body, timeout_seconds=timeout_seconds)).content
        try:
            replies = [reply.meta_info for reply in _DECODER.decode(content)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(f"{url}: it does not score texts: {error}") from error
        if not any(meta.finish_reason is not None and meta.finish_reason.type == "abort" for meta in replies):
            break
    else:
        raise EngineUnavailableError(f"{url}: it ended {_TRIES} requests to score texts before they were scored")
    for meta in replies:
        if meta.weight_version is not None and version_number(meta.weight_version) != policy_version:
            raise EngineProtocolError(f"{url}: scored by version {meta.weight_version}, not {policy_version}")
    scored = [meta.input_token_logprobs or [] for meta in replies]
    if any(meta.input_token_logprobs is None for meta in replies):
        raise EngineProtocolError(f"{url}: it does not score texts: a reply has no input_token_logprobs")
    if not _are_of(scored, texts):
        raise EngineProtocolError(f"{url}: it scored other tokens than it was sent")
    return np.array([each.logprob for text in scored for each in text[1:]], np.float64)


def _are_of(scored: Sequence[Sequence[_Scored]], texts: Sequence[NDArray[np.int32]]) -> bool:
    if [len(text) for text in scored] != [len(text) for text in texts]:
        return False
    told_N = np.array([each.token_id for text in scored for each in text])
    # The last id of the vocabulary is told as 0 (0.5.23), since ids beyond it stand for images.
    return bool(((told_N == np.concatenate(texts)) | (told_N == 0)).all())
