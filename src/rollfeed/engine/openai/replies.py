"""From the pieces of a reply to checked arrays.

Axis: R response tokens of one try. A piece is one event of a stream, or the whole of a reply that
is not streamed; both have the same form.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.http import Failure, TryFailedError, error_message
from rollfeed.engine.weight_versions import NamedSpan, read_spans
from rollfeed.errors import EngineProtocolError
from rollfeed.types import FinishKind, FinishReason, VersionSpan

_LOWEST_LOGPROB = -9999.0
"""What vLLM writes for minus infinity and where it has no logprob."""
_LARGEST_ID = 2**31 - 1
_ID_PREFIX = "token_id:"


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


class _PromptUsage(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _PromptUsage | None = None


class _Piece(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct, gc=False):
    code: Any = None


_DECODER = msgspec.json.Decoder(_Piece)


class Answer:
    """What one try has sampled so far."""

    def __init__(self, *, prompt_ids: NDArray[np.int32], max_new_tokens: int) -> None:
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.version_spans: tuple[VersionSpan, ...] = ()
        """Known at the end, where the server tells them."""
        self.lacks_ids = False
        """Whether tokens came without their ids."""
        self.lacks_logprobs = False
        self._prompt_ids = prompt_ids
        self._max_new_tokens = max_new_tokens
        self._ids = array("i")
        self._logprobs = array("f")
        self._has_ids = False
        self._weight_versions: list[NamedSpan] | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """What came without token ids."""
        return "".join(self._texts)

    @property
    def num_tokens(self) -> int:
        """Tokens so far; of text without ids, its pieces."""
        return len(self._ids) or len(self._texts)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """``(R,)``."""
        return np.array(self._ids, np.int32)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """``(R,)``; means nothing when the reply lacks ids or logprobs."""
        return np.array(self._logprobs, np.float32)

    def take(self, content: bytes) -> None:
        """Add a piece.

        Raises:
            TryFailedError: If it is no JSON, or says that the server failed.
            EngineProtocolError: If it is, and breaks the contract.
        """
        try:
            piece = _DECODER.decode(content)
        except msgspec.ValidationError as error:
            raise EngineProtocolError(f"reply: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TryFailedError(Failure.BROKEN, f"reply: {error}") from error
        if bytes(piece.error) != b"null":
            raise _failure(bytes(piece.error))
        if piece.usage is not None and piece.usage.prompt_tokens_details is not None:
            self.cached_tokens = piece.usage.prompt_tokens_details.cached_tokens or 0
        if len(piece.choices) > 1:
            raise EngineProtocolError(f"reply: {len(piece.choices)} choices where one was asked for")
        for choice in piece.choices:
            self._add(choice)

    def end(self) -> None:
        """Conclude from the end of a reply what it has not said.

        A stream that ends without a reason was aborted: servers leave the last, empty event out.

        Raises:
            EngineProtocolError: If the versions that it names do not fit its tokens.
        """
        if self.finish is None:
            self.finish = FinishReason(FinishKind.ABORT)
        if not self._has_ids and self.finish.kind is not FinishKind.ABORT:
            self.lacks_ids = True
        if self._weight_versions is not None and self._has_ids:
            self.version_spans = read_spans(self._weight_versions, len(self._ids))

    def forget(self) -> None:
        """Have no tokens, as after an abort before the first one."""
        del self._ids[:], self._logprobs[:]
        self.version_spans, self.finish = (), FinishReason(FinishKind.ABORT)

    def _add(self, choice: _Choice) -> None:
        if choice.prompt_token_ids is not None and not np.array_equal(choice.prompt_token_ids, self._prompt_ids):
            raise EngineProtocolError("reply: the server did not see the tokens that it was sent, but others")
        ids, logprobs = _ids(choice), _logprobs(choice.logprobs)
        if ids is None:
            self._texts.append(choice.text or "")
            self.lacks_ids = self.lacks_ids or bool(choice.text or logprobs)
        else:
            self._has_ids = True
            self._append(ids, logprobs)
        if choice.weight_versions is not None:
            self._weight_versions = choice.weight_versions
        if choice.finish_reason is not None:
            self.finish = self._finish_reason(choice.finish_reason, choice.stop_reason)

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


def _ids(choice: _Choice) -> Sequence[int] | None:
    if choice.token_ids is not None:
        return choice.token_ids
    tokens = choice.logprobs.tokens if choice.logprobs is not None else None
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


def _failure(content: bytes) -> Exception:
    """Return what an error inside a reply with status 200 means."""
    message = f"the server ended the request: {error_message(content)}"
    try:
        code = msgspec.json.decode(content, type=_Error).code
    except msgspec.DecodeError:
        code = None
    if code == 429:
        return TryFailedError(Failure.REFUSED, message)
    if isinstance(code, int) and 400 <= code < 500:
        return EngineProtocolError(message)
    return TryFailedError(Failure.SERVER, message)
