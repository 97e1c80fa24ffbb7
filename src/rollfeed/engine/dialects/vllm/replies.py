"""From the pieces of a reply to checked arrays.

Axis: R response tokens of one try. A piece is one event of a stream, or the whole of a reply that
is not streamed; both have the same form.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.client.replies import Reply, decoded
from rollfeed.engine.client.versions import NamedSpan, read_spans
from rollfeed.engine.http import Failure, TryFailedError, error_message
from rollfeed.errors import EngineProtocolError, PictureMismatchError
from rollfeed.protocols import Tokenizer
from rollfeed.types import FinishKind, FinishReason, RoutedExperts, SeenPicture, VersionSpan

_LOWEST_LOGPROB = -9999.0
"""What vLLM writes for minus infinity and where it has no logprob."""
_LARGEST_ID = 2**31 - 1
_ID_PREFIX = "token_id:"
_EXPERT_FILE = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)
IDS, LOGPROBS = "token ids", "logprobs"


class _Content(msgspec.Struct, gc=False):
    token: str = ""
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    content: list[_Content] | None = None
    """Instead of both, on the route for tokens."""


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[NamedSpan] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    """Base64 of a ``.npy`` file of ``(N, layers, experts a token)``, at the end of a response."""


class _PromptUsage(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptUsage | None = None


class _Place(msgspec.Struct, gc=False):
    offset: int
    length: int


class _Piece(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    id: str | None = None
    request_id: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct, gc=False):
    code: Any = None


_DECODER = msgspec.json.Decoder(_Piece)


class VLLMAnswer:
    """Collects what one try has sampled so far.

    With ``exact`` a reply without exact tokens and logprobs is refused; ``lacks`` names what none of this server has.
    Experts are read ``with_experts`` only: a server that returns them does so whether they are asked for or not.
    """

    def __init__(
        self,
        *,
        prompt_ids: NDArray[np.int32],
        max_new_tokens: int,
        exact: bool,
        with_experts: bool = False,
        lacks: tuple[str, ...] = (),
        tokenizer: Tokenizer,
    ) -> None:
        self.lacks_ids = False
        """Whether tokens came without their ids."""
        self.lacks_logprobs = False
        self.has_experts = False
        """Whether experts came, whoever asked for them."""
        self._prompt_ids = prompt_ids
        self._max_new_tokens = max_new_tokens
        self._exact = exact
        self._with_experts = with_experts
        self._experts = b""
        self._always_lacks = lacks
        self._tokenizer = tokenizer
        self._finish: FinishReason | None = None
        self._ids = array("i")
        self._logprobs = array("f")
        self._has_ids = False
        self._weight_versions: list[NamedSpan] | None = None
        self._texts: list[str] = []
        self._usage: _Usage | None = None
        self._request_id: str | None = None
        self._seen: tuple[SeenPicture, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far; of text without ids, its pieces."""
        return len(self._ids) or len(self._texts)

    @property
    def has_finished(self) -> bool:
        return self._finish is not None

    @property
    def lacks(self) -> tuple[str, ...]:
        """Names of what is not there and cannot be trained without."""
        has_ended = self._finish is not None and self._finish.kind is not FinishKind.ABORT
        lacks_ids = self.lacks_ids or (has_ended and not self._has_ids)
        told = ((IDS, lacks_ids), (LOGPROBS, self.lacks_logprobs))
        return self._always_lacks or tuple(name for name, is_lacking in told if is_lacking)

    def take(self, content: bytes | bytearray) -> None:
        """Add a piece.

        Raises:
            TryFailedError: If it is no JSON, or says that the server failed.
            EngineProtocolError: If it is, and breaks the contract.
        """
        piece = decoded(_DECODER, content, place="reply")
        if bytes(piece.error) != b"null":
            raise _failure(bytes(piece.error))
        self._usage = piece.usage or self._usage
        self._request_id = piece.request_id or piece.id or self._request_id
        if piece.mm_placeholders is not None:
            places = sorted((each.offset, each.length) for found in piece.mm_placeholders.values() for each in found)
            self._seen = tuple(SeenPicture("", offset, offset + length) for offset, length in places)
        if piece.prompt_token_ids is not None and not np.array_equal(piece.prompt_token_ids, self._prompt_ids):
            raise PictureMismatchError(
                f"the server has made {len(piece.prompt_token_ids)} tokens of a prompt with pictures that are not the "
                f"{len(self._prompt_ids)} of the model's processor"
            )
        if len(piece.choices) > 1:
            raise EngineProtocolError(f"reply: {len(piece.choices)} choices where one was asked for")
        for choice in piece.choices:
            self._add(choice)

    def reply(self) -> Reply:
        """Return what has come.

        A stream that ends without a reason was aborted: servers leave the last, empty event out.

        Raises:
            EngineProtocolError: If something is missing, or the versions do not fit the tokens.
        """
        finish, lacks = self._finish or FinishReason(FinishKind.ABORT), self.lacks
        if lacks and self._exact:
            raise EngineProtocolError(f"reply: it has no {' and no '.join(lacks)}")
        token_ids, text = np.array(self._ids, np.int32), None
        if lacks and (self.lacks_ids or not self._has_ids):
            text = "".join(self._texts)
            token_ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        spans: tuple[VersionSpan, ...] = ()
        if self._weight_versions is not None and self._has_ids:
            spans = read_spans(self._weight_versions, len(self._ids))
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details or _PromptUsage()
        return Reply(
            token_ids=token_ids,
            logprobs=np.full(len(token_ids), np.nan, np.float32) if lacks else np.array(self._logprobs, np.float32),
            finish_reason=finish,
            version_spans=spans,
            policy_version=spans[-1].policy_version if spans else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
            request_id=self._request_id,
            text=text,
            seen_pictures=self._seen,
            is_exact=not lacks,
            routed_experts=None
            if not self._experts or not len(token_ids)
            else _routed_experts(self._experts, num_tokens=len(self._prompt_ids) + len(token_ids) - 1),
        )

    def _add(self, choice: _Choice) -> None:
        if choice.prompt_token_ids is not None and not np.array_equal(choice.prompt_token_ids, self._prompt_ids):
            raise EngineProtocolError("reply: the server did not see the tokens that it was sent, but others")
        beside, logprobs = _ids_beside(choice.logprobs), _logprobs(choice.logprobs)
        ids = beside if choice.token_ids is None else choice.token_ids
        if beside and beside != ids:
            raise EngineProtocolError("reply: its token ids are not the ids beside its logprobs")
        if ids is None:
            self._texts.append(choice.text or "")
            self.lacks_ids = self.lacks_ids or bool(choice.text or logprobs)
        else:
            self._has_ids = True
            self._append(ids, logprobs)
        if choice.weight_versions is not None:
            self._weight_versions = choice.weight_versions
        if (experts := bytes(choice.routed_experts)) != b"null":
            self.has_experts = True
            self._experts = experts if self._with_experts else b""
        if choice.finish_reason is not None:
            self._finish = self._finish_reason(choice.finish_reason, choice.stop_reason)

    def _append(self, ids: Sequence[int], logprobs: Sequence[float | None]) -> None:
        if len(self._ids) + len(ids) > self._max_new_tokens:
            raise EngineProtocolError(f"reply: more than {self._max_new_tokens} tokens, which were asked for")
        if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_ID:
            raise EngineProtocolError(f"reply: its token ids go from {min(ids)} to {max(ids)}")
        self._ids.extend(ids)
        if not logprobs and ids:
            self.lacks_logprobs = True
            return
        if len(logprobs) != len(ids):
            raise EngineProtocolError(f"reply: {len(logprobs)} logprobs for {len(ids)} tokens")
        for logprob in logprobs:
            if logprob is None or logprob <= _LOWEST_LOGPROB:
                raise EngineProtocolError("reply: a sampled token has no logprob")
            if not logprob <= 1e-6:
                raise EngineProtocolError(f"reply: a logprob is {logprob}")
            self._logprobs.append(min(logprob, 0.0))

    def _finish_reason(self, name: str, stop_reason: int | str | None) -> FinishReason:
        try:
            kind = FinishKind(name)
        except ValueError:
            raise EngineProtocolError(f"reply: unknown finish reason {name!r}") from None
        if kind is not FinishKind.STOP:
            return FinishReason(kind)
        if isinstance(stop_reason, int) and self._has_ids and (not self._ids or self._ids[-1] != stop_reason):
            raise EngineProtocolError(
                f"reply: it stopped at token {stop_reason}, which is not the last of its ids; it must not be trimmed"
            )
        return FinishReason(kind, stop_reason)


def _ids_beside(logprobs: _Logprobs | None) -> list[int] | None:
    if logprobs is None:
        return None
    tokens = logprobs.tokens if logprobs.content is None else [content.token for content in logprobs.content]
    if tokens is None or not all(token.startswith(_ID_PREFIX) for token in tokens):
        return None
    try:
        return [int(token.removeprefix(_ID_PREFIX)) for token in tokens]
    except ValueError:
        return None


def _logprobs(logprobs: _Logprobs | None) -> Sequence[float | None]:
    if logprobs is None:
        return ()
    if logprobs.content is not None:
        return [content.logprob for content in logprobs.content]
    return logprobs.token_logprobs or ()


def _routed_experts(told: bytes, *, num_tokens: int) -> RoutedExperts:
    """Return the experts in a ``.npy`` file as a reply tells it; nothing is made in the size that it claims."""
    try:
        content = msgspec.json.decode(told, type=bytes)
        if (header := _EXPERT_FILE.match(content)) is None:
            raise ValueError("no .npy file of three axes of integers")
        shape = tuple(map(int, header.groups()[1:]))
        if shape[0] != num_tokens or not shape[1] * shape[2]:
            raise ValueError(f"of shape {shape}, where {num_tokens} tokens were computed")
        numbers = np.frombuffer(content, header[1].decode(), offset=header.end())
        return RoutedExperts.of(numbers.reshape(num_tokens, shape[1] * shape[2]))
    except (ValueError, msgspec.DecodeError) as error:
        raise EngineProtocolError(f"reply: its routed_experts cannot be read: {error}") from None


def _failure(content: bytes) -> Exception:
    """Return what an error inside a reply with status 200 means."""
    message = f"the server ended the request: {error_message(content)}"
    try:
        code = msgspec.json.decode(content, type=_Error).code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        code = None
    if code == 429:
        return TryFailedError(Failure.REFUSED, message)
    if isinstance(code, int) and 400 <= code < 500:
        return EngineProtocolError(message)
    return TryFailedError(Failure.SERVER, message)
