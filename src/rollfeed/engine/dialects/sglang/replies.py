"""From the bytes of a ``/generate`` reply to arrays that agree with all that it says of them.

Axis: R response tokens of one reply.

The tokens are decoded into plain records that the garbage collector does not track, and from there
into arrays; nothing else is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.client.replies import Reply, decoded
from rollfeed.engine.client.versions import NamedSpan, read_spans, version_number
from rollfeed.engine.http import Failure, TryFailedError
from rollfeed.errors import EngineProtocolError
from rollfeed.types import FinishKind, FinishReason, RoutedExperts, SamplingMask, SeenPicture


class _Token(msgspec.Struct, array_like=True, gc=False):
    """The head of ``[logprob, token_id, text]``; both as numbers of one size, so that they pack side by side."""

    logprob: float
    token_id: float


class _Finish(msgspec.Struct, gc=False):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _Seen(msgspec.Struct, gc=False):
    content_hash: str
    start: int
    end: int


class _Meta(msgspec.Struct, gc=False):
    finish_reason: _Finish
    id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    output_token_logprobs: list[_Token] | None = None
    output_token_logprobs_length: int | None = None
    weight_versions: list[NamedSpan] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    routed_experts: bytes | None = None
    """Base64 of int32."""
    pictures: list[_Seen] | None = None
    """Of the embedded server, which alone tells."""


class _Body(msgspec.Struct, gc=False):
    """Its text is not read unless it is wanted: tokens have theirs from the tokenizer."""

    meta_info: _Meta
    output_ids: msgspec.Raw = msgspec.Raw(b"null")


class _BodyWithText(_Body, gc=False):
    text: str | None = None


_DECODERS: Mapping[bool, msgspec.json.Decoder[Any]] = {
    False: msgspec.json.Decoder(_Body),
    True: msgspec.json.Decoder(_BodyWithText),
}
"""By whether the text is wanted."""
_PACKER = msgspec.msgpack.Encoder()
_PACKED_BYTES = 19
"""Of a list of two float64 in MessagePack: one for the list, and for each one of type and eight of value."""


class SGLangAnswer:
    """A whole reply to ``/generate``."""

    def __init__(self, *, max_new_tokens: int, with_mask: bool, with_text: bool = False) -> None:
        self._max_new_tokens = max_new_tokens
        self._with_mask = with_mask
        self._with_text = with_text
        self._reply: Reply | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self._reply is None else len(self._reply.token_ids)

    @property
    def has_finished(self) -> bool:
        return self._reply is not None

    def take(self, content: bytes | bytearray) -> None:
        self._reply = decode_reply(
            content, max_new_tokens=self._max_new_tokens, with_mask=self._with_mask, with_text=self._with_text
        )

    def reply(self) -> Reply:
        if self._reply is None:
            raise EngineProtocolError("reply to /generate: there is none")
        return self._reply


def decode_reply(
    content: bytes | bytearray, *, max_new_tokens: int, with_mask: bool = False, with_text: bool = False
) -> Reply:
    """Return the arrays of a reply, which all that it says agrees with; their range is the client's to check.

    With ``with_mask`` the log-probabilities are those among what each token was drawn from; ``output_token_logprobs``
    are of the whole vocabulary. With ``with_text`` the reply has the server's text.

    Raises:
        TryFailedError: If the bytes are no JSON, or the server says that it failed itself.
        EngineProtocolError: If they are, and break the contract.
    """
    body: _Body = decoded(_DECODERS[with_text], content, place="reply to /generate")
    meta = body.meta_info
    finish_reason = _finish_reason(meta.finish_reason)
    if meta.output_token_logprobs is None:
        if finish_reason.kind is not FinishKind.ABORT and len(_ids(body.output_ids)):
            raise EngineProtocolError("reply to /generate: tokens without output_token_logprobs")
        return _reply(meta, finish_reason, np.empty(0, np.int32), np.empty(0, np.float32))
    told_ids, logprobs = _tokens(meta.output_token_logprobs)
    token_ids = _checked_ids(body, told_ids, logprobs, max_new_tokens=max_new_tokens)
    matched = finish_reason.matched
    if isinstance(matched, int) and (not len(token_ids) or token_ids[-1] != matched):
        raise EngineProtocolError(
            f"reply to /generate: it stopped at token {matched}, which is not the last of its ids; "
            "tokens must not be trimmed"
        )
    mask = None
    if with_mask and len(token_ids):
        mask, logprobs = _sampling_mask(meta, token_ids)
    reply = _reply(meta, finish_reason, token_ids, logprobs, mask)
    return reply._replace(text=body.text) if isinstance(body, _BodyWithText) else reply


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
    meta: _Meta,
    finish_reason: FinishReason,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    sampling_mask: SamplingMask | None = None,
) -> Reply:
    return Reply(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        policy_version=None if meta.weight_version is None else version_number(meta.weight_version),
        version_spans=() if meta.weight_versions is None else read_spans(meta.weight_versions, len(token_ids)),
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens or 0,
        request_id=meta.id,
        sampling_mask=sampling_mask,
        seen_pictures=None
        if meta.pictures is None
        else tuple(SeenPicture(each.content_hash, each.start, each.end) for each in meta.pictures),
        routed_experts=_routed_experts(meta, len(token_ids)),
    )


def _routed_experts(meta: _Meta, num_sampled: int) -> RoutedExperts | None:
    if meta.routed_experts is None or not num_sampled:
        return None
    num_tokens = (meta.prompt_tokens or 0) + num_sampled - 1
    if num_tokens < 1 or not meta.routed_experts or len(meta.routed_experts) % (4 * num_tokens):
        raise EngineProtocolError(
            f"reply to /generate: routed_experts has {len(meta.routed_experts)} bytes, no number of int32 for each of "
            f"{num_tokens} tokens"
        )
    try:
        return RoutedExperts.of(np.frombuffer(meta.routed_experts, "<i4").reshape(num_tokens, -1))
    except ValueError as error:
        raise EngineProtocolError(f"reply to /generate: {error}") from None


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


def _tokens(entries: Sequence[_Token]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the ids beside the log-probabilities, and these."""
    # Packing puts the numbers side by side at fixed distances, from where numpy takes them in one go:
    # three times as fast as asking each record for its numbers.
    num_entries = len(entries)
    if not num_entries:
        return np.empty(0), np.empty(0, np.float32)
    packed = _PACKER.encode(entries)
    first = len(packed) - num_entries * _PACKED_BYTES
    with np.errstate(over="ignore"):  # what float32 cannot hold is found by whoever looks for finite numbers
        logprobs = np.ndarray((num_entries,), ">f8", packed, first + 2, (_PACKED_BYTES,)).astype(np.float32)
    return np.ndarray((num_entries,), ">f8", packed, first + 11, (_PACKED_BYTES,)).astype(np.float64), logprobs


def _ids(output_ids: msgspec.Raw) -> NDArray[np.int64]:
    """Return the numbers of a JSON list, from its text; none where there is no list."""
    text = bytes(output_ids).strip()
    if text == b"null":
        return np.empty(0, np.int64)
    inner = text[1:-1].strip()
    if text[:1] == b"[" and not inner:
        return np.empty(0, np.int64)
    try:
        numbers = np.fromstring(inner, np.int64, sep=",") if text[:1] == b"[" else np.empty(0, np.int64)
    except (ValueError, DeprecationWarning):
        numbers = np.empty(0, np.int64)
    # Reading stops where no integer is.
    if len(numbers) != inner.count(b",") + 1:
        raise EngineProtocolError("reply to /generate: output_ids are not all integers")
    return numbers


def _checked_ids(
    body: _Body, told_ids: NDArray[np.float64], logprobs: NDArray[np.float32], *, max_new_tokens: int
) -> NDArray[np.int32]:
    """Return the ids of a reply: those beside its log-probabilities, which its ``output_ids`` must be."""
    with np.errstate(invalid="ignore"):  # what int32 cannot hold is not equal to what was told
        token_ids = told_ids.astype(np.int32)
    listed = None if bytes(body.output_ids) == b"null" else _ids(body.output_ids)
    meta, num_tokens = body.meta_info, len(logprobs)
    for told, what in (
        (num_tokens if listed is None else len(listed), "output_ids"),
        (meta.completion_tokens, "completion_tokens"),
        (meta.output_token_logprobs_length, "output_token_logprobs_length"),
    ):
        if told is not None and told != num_tokens:
            raise EngineProtocolError(f"reply to /generate: {num_tokens} logprobs, but {told} by its {what}")
    if num_tokens > max_new_tokens:
        raise EngineProtocolError(f"reply to /generate: {num_tokens} tokens, {max_new_tokens} were asked for")
    # A comparison of bytes takes a third of the time of one of numbers.
    if token_ids.astype(np.float64).tobytes() != told_ids.tobytes():
        raise EngineProtocolError("reply to /generate: token ids out of range, or no integers")
    if listed is not None and token_ids.astype(np.int64).tobytes() != listed.tobytes():
        raise EngineProtocolError("reply to /generate: its output_ids are not the ids beside its logprobs")
    return token_ids
