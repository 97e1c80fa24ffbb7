"""From the bytes of a ``/generate`` reply to checked arrays.

Axis: R response tokens of one reply.

The tokens are decoded into plain records that the garbage collector does not track, and from there
into arrays; nothing else is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.http import Failure, TryFailedError
from rollfeed.engine.weight_versions import NamedSpan, read_spans, version_number
from rollfeed.errors import EngineProtocolError
from rollfeed.types import FinishKind, FinishReason, SamplingMask, VersionSpan

_LARGEST_ID = 2**31 - 1


class Reply(NamedTuple):
    """What one try has sampled."""

    token_ids: NDArray[np.int32]
    """``(R,)``."""
    logprobs: NDArray[np.float32]
    """``(R,)``."""
    text: str
    finish_reason: FinishReason
    policy_version: int | None
    """Of the last token; None where the server does not say."""
    version_spans: tuple[VersionSpan, ...]
    """Empty unless the server tells the version of each token."""
    prompt_tokens: int
    cached_tokens: int
    sampling_mask: SamplingMask | None = None


class _Logprob(msgspec.Struct, array_like=True, gc=False):
    """The head of ``[logprob, token_id, text]``; the ids are read from ``output_ids``."""

    logprob: float


class _Token(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    token_id: int


class _Finish(msgspec.Struct, gc=False):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct, gc=False):
    finish_reason: _Finish
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_token_logprobs_length: int | None = None
    weight_versions: list[NamedSpan] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class _Body(msgspec.Struct, gc=False):
    meta_info: _Meta
    text: str = ""
    output_ids: msgspec.Raw = msgspec.Raw(b"null")


class _TokenMeta(msgspec.Struct, gc=False):
    output_token_logprobs: list[_Token]


class _TokenBody(msgspec.Struct, gc=False):
    meta_info: _TokenMeta


_DECODER = msgspec.json.Decoder(_Body)
_TOKEN_DECODER = msgspec.json.Decoder(_TokenBody)
_PACKER = msgspec.msgpack.Encoder()
_PACKED_BYTES = 10
"""Of a list of one float64 in MessagePack: two of type, eight of value."""


def decode_reply(content: bytes | bytearray, *, max_new_tokens: int, with_mask: bool = False) -> Reply:
    """Return the arrays of a reply, all of it checked.

    With ``with_mask`` the log-probabilities are those among what each token was drawn from; ``output_token_logprobs``
    are of the whole vocabulary.

    Raises:
        TryFailedError: If the bytes are no JSON, or the server says that it failed itself.
        EngineProtocolError: If they are, and break the contract.
    """
    try:
        body = _DECODER.decode(content)
    except msgspec.ValidationError as error:
        raise EngineProtocolError(f"reply to /generate: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TryFailedError(Failure.BROKEN, f"reply to /generate: {error}") from error
    meta = body.meta_info
    finish_reason = _finish_reason(meta.finish_reason)
    if meta.output_token_logprobs is None:
        if finish_reason.kind is not FinishKind.ABORT and len(_ids(body.output_ids)):
            raise EngineProtocolError("reply to /generate: tokens without output_token_logprobs")
        return _reply(body, finish_reason, np.empty(0, np.int32), np.empty(0, np.float32))
    logprobs = _logprobs(meta.output_token_logprobs)
    token_ids = _ids(body.output_ids) if bytes(body.output_ids) != b"null" else _ids_of_tokens(content)
    _check(body, token_ids, logprobs, max_new_tokens=max_new_tokens)
    matched = finish_reason.matched
    if isinstance(matched, int) and (not len(token_ids) or token_ids[-1] != matched):
        raise EngineProtocolError(
            f"reply to /generate: it stopped at token {matched}, which is not the last of its ids; "
            "tokens must not be trimmed"
        )
    mask = None
    if with_mask and len(token_ids):
        mask, logprobs = _sampling_mask(meta, token_ids.astype(np.int32))
    return _reply(body, finish_reason, token_ids.astype(np.int32), logprobs, mask)


def _sampling_mask(meta: _Meta, token_ids: NDArray[np.int32]) -> tuple[SamplingMask, NDArray[np.float32]]:
    if meta.output_token_sampling_mask is None or meta.output_token_sampling_logprobs is None:
        raise EngineProtocolError(
            "reply to /generate: no output_token_sampling_mask, which sampling.return_sampling_mask asks for: SGLang "
            "has it from 0.5.23 on; set it to false for this server"
        )
    logprobs = np.array(meta.output_token_sampling_logprobs, np.float32)
    try:
        mask = SamplingMask.of(meta.output_token_sampling_mask)
        mask.check(token_ids)
    except (ValueError, OverflowError) as error:
        raise EngineProtocolError(f"reply to /generate: {error}") from None
    if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all() or (mask.lengths == 0).any():
        raise EngineProtocolError(
            f"reply to /generate: output_token_sampling_mask and output_token_sampling_logprobs are not those of "
            f"{len(token_ids)} tokens"
        )
    return mask, logprobs


def _reply(
    body: _Body,
    finish_reason: FinishReason,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    sampling_mask: SamplingMask | None = None,
) -> Reply:
    meta = body.meta_info
    return Reply(
        token_ids=token_ids,
        logprobs=logprobs,
        text=body.text if len(token_ids) else "",
        finish_reason=finish_reason,
        policy_version=None if meta.weight_version is None else version_number(meta.weight_version),
        version_spans=() if meta.weight_versions is None else read_spans(meta.weight_versions, len(token_ids)),
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens or 0,
        sampling_mask=sampling_mask,
    )


def _finish_reason(finish: _Finish) -> FinishReason:
    if finish.type == "abort" and finish.status_code is not None:
        message = f"the server ended the request: {finish.status_code}: {finish.message}"
        if finish.status_code == 429:
            raise TryFailedError(Failure.REFUSED, message)
        if finish.status_code >= 500:
            raise TryFailedError(Failure.SERVER, message)
        raise EngineProtocolError(message)
    try:
        kind = FinishKind(finish.type)
    except ValueError:
        raise EngineProtocolError(f"reply to /generate: unknown finish reason {finish.type!r}") from None
    return FinishReason(kind, finish.matched if kind is FinishKind.STOP else None)


def _logprobs(entries: Sequence[_Logprob]) -> NDArray[np.float32]:
    # Packing puts the numbers side by side at fixed distances, from where numpy takes them in one go:
    # three times as fast as asking each record for its number.
    num_entries = len(entries)
    if not num_entries:
        return np.empty(0, np.float32)
    packed = _PACKER.encode(entries)
    first = len(packed) - num_entries * _PACKED_BYTES + 2
    with np.errstate(over="ignore"):  # what float32 cannot hold is found by whoever looks for finite numbers
        return np.ndarray((num_entries,), ">f8", packed, first, (_PACKED_BYTES,)).astype(np.float32)


def _ids(output_ids: msgspec.Raw) -> NDArray[np.int64]:
    """Return the numbers of a JSON list, from its text; none where there is no list."""
    text = bytes(output_ids).strip(b"[] \t\r\n")
    if not text or text == b"null":
        return np.empty(0, np.int64)
    try:
        numbers = np.fromstring(text, np.int64, sep=",")
    except (ValueError, DeprecationWarning):
        numbers = np.empty(0, np.int64)
    # Reading stops where no integer is.
    if len(numbers) != text.count(b",") + 1:
        raise EngineProtocolError("reply to /generate: output_ids are not all integers")
    return numbers


def _ids_of_tokens(content: bytes | bytearray) -> NDArray[np.int64]:
    try:
        tokens = _TOKEN_DECODER.decode(content).meta_info.output_token_logprobs
    except msgspec.ValidationError as error:
        raise EngineProtocolError(f"reply to /generate: {error}") from error
    return np.array([token.token_id for token in tokens], np.int64)


def _check(body: _Body, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32], *, max_new_tokens: int) -> None:
    meta, num_tokens = body.meta_info, len(logprobs)
    for told, what in (
        (len(token_ids), "output_ids"),
        (meta.completion_tokens, "completion_tokens"),
        (meta.output_token_logprobs_length, "output_token_logprobs_length"),
    ):
        if told is not None and told != num_tokens:
            raise EngineProtocolError(f"reply to /generate: {num_tokens} logprobs, but {told} by its {what}")
    if num_tokens > max_new_tokens:
        raise EngineProtocolError(f"reply to /generate: {num_tokens} tokens, {max_new_tokens} were asked for")
    if not num_tokens:
        return
    if token_ids.min() < 0 or token_ids.max() > _LARGEST_ID or not np.isfinite(logprobs).all():
        raise EngineProtocolError("reply to /generate: token ids out of range, or logprobs that are not finite")
