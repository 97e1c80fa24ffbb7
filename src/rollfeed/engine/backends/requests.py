"""One request inside a local engine: what has been sampled so far, and whether that ends it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.engine.backends.sampling import TopTokens
from rollfeed.protocols import Tokenizer
from rollfeed.types import (
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    SeenPicture,
    VersionSpan,
)

_TAIL_SPARE_TOKENS = 8
"""Decoded before the longest possible stop string, for tokens that have no text of their own."""


class RequestPictures(NamedTuple):
    """Pictures of a prompt."""

    seen: tuple[SeenPicture, ...] = ()
    """Which they are, and which tokens of the prompt stand for them."""
    pixels: Mapping[str, NDArray[Any]] = {}
    """What the model takes of them, by its names."""

    @property
    def content_hashes(self) -> tuple[str, ...]:
        return tuple(each.content_hash for each in self.seen)

    def is_picture(self, num_tokens: int) -> NDArray[np.bool_]:
        """Return which tokens of the prompt stand for pictures, ``(P,)``."""
        found = np.zeros(num_tokens, bool)
        for _, start, end in self.seen:
            found[start:end] = True
        return found


class Request:
    """A prompt of P tokens and the R tokens sampled for it.

    Made on the event loop, then touched by the engine's thread only. :attr:`reply` is thread-safe.
    """

    experts_so_far: Callable[[], NDArray[np.integer]] | None = None
    """What the tokens have been computed with, at least those before the newest, ``(N, C)``; set by backends."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: NDArray[np.int32],
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        context_length: int,
        score_from: int | None = None,
        score_temperature: float = 1.0,
        num_tops: int = 0,
        on_progress: Callable[[], None] | None = None,
        pictures: RequestPictures | None = None,
    ) -> None:
        """Take a prompt to continue.

        Args:
            request_id: For aborts; need not be unique.
            prompt_ids: At least one. ``(P,)``.
            params: How to sample.
            eos_token_ids: Ids that end the response, besides ``params.stop_token_ids``.
            context_length: Most tokens of prompt and response together.
            score_from: Also compute the log-probabilities of the prompt tokens behind this one.
            score_temperature: Of these.
            num_tops: Of the likeliest tokens at each place, to be told in :attr:`tops_R`.
            on_progress: Called on the engine's thread after each token that does not end the response.
            pictures: Of the prompt.
        """
        self.pictures = pictures or RequestPictures()
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.stop_ids = frozenset(eos_token_ids) | frozenset(params.stop_token_ids)
        self.max_new_tokens = min(params.max_new_tokens, context_length - len(prompt_ids))
        """What both ``max_new_tokens`` and the context allow."""
        self.reply: Future[Completion] = Future()
        # A cancelled future could not be given a result; cancellation goes through the engine instead.
        self.reply.set_running_or_notify_cancel()
        self.num_new_tokens = 0
        self.num_published = 0
        """Sampled tokens that are known not to have ended the response; never more than ``num_new_tokens``."""
        self.num_retractions = 0
        self.score_from = score_from
        self.score_temperature = score_temperature
        self.prompt_logprobs = np.full(0 if score_from is None else len(prompt_ids), np.nan, np.float32)
        """Of each prompt token after ``score_from``, at ``score_temperature``; NaN for the others. ``(P,)`` when it was
        asked for."""
        self.num_tops = num_tops
        self.tops_R: list[TopTokens] = []
        """The likeliest tokens where each sampled one stands; empty where none were asked for. ``(R,)``."""
        self._on_progress = on_progress
        self.cached_tokens = 0
        self._token_ids_R = np.empty(self.max_new_tokens, np.int32)
        self._logprobs_R = np.empty(self.max_new_tokens, np.float32)
        self._kept_R: list[NDArray[np.int32]] = []
        self._spans: list[VersionSpan] = []
        self._submitted_at = time.monotonic()
        self._started_at: float | None = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The ids sampled so far, a view. ``(R,)``."""
        return self._token_ids_R[: self.num_new_tokens]

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.prompt_ids) + self.num_new_tokens

    @property
    def all_token_ids(self) -> NDArray[np.int32]:
        """Prompt and sampled tokens. ``(P + R,)``."""
        return np.concatenate([self.prompt_ids, self.token_ids])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """The log-probabilities of the sampled ids, a view. ``(R,)``."""
        return self._logprobs_R[: self.num_new_tokens]

    @property
    def needs_scoring(self) -> bool:
        """Whether the log-probabilities of the prompt are still to be computed."""
        return self.score_from is not None and self.num_new_tokens == 0

    @property
    def is_started(self) -> bool:
        """Whether the engine has begun to work on it."""
        return self._started_at is not None

    def start(self) -> None:
        """Note that the engine has begun to work on it."""
        self._started_at = time.monotonic()

    def append(
        self,
        token_id: int,
        logprob: float,
        *,
        policy_version: int,
        kept: NDArray[np.int32] | None = None,
        tops: TopTokens = (),
    ) -> None:
        """Take a sampled token, and what it was drawn from and was likeliest where that is asked for."""
        if self.num_tops:
            self.tops_R.append(tops)
        if self.params.return_sampling_mask and kept is not None:
            self._kept_R.append(kept)
        position = self.num_new_tokens
        self._token_ids_R[position] = token_id
        self._logprobs_R[position] = logprob
        self.num_new_tokens = position + 1
        if self._spans and self._spans[-1].policy_version == policy_version:
            self._spans[-1] = self._spans[-1]._replace(end=position + 1)
        else:
            self._spans.append(VersionSpan(position, position + 1, policy_version))

    def publish(self) -> None:
        """Let the caller see the tokens so far: the newest one did not end the response."""
        self.num_published = self.num_new_tokens
        if self._on_progress is not None:
            self._on_progress()

    def finish_reason(self, tokenizer: Tokenizer) -> FinishReason | None:
        """Return why it ends after its newest token, or None when it goes on."""
        newest = int(self._token_ids_R[self.num_new_tokens - 1])
        if newest in self.stop_ids:
            return FinishReason(FinishKind.STOP, newest)
        if self.params.stop and self.num_new_tokens >= self.params.min_new_tokens:
            matched = self._stop_string(tokenizer)
            if matched is not None:
                return FinishReason(FinishKind.STOP, matched)
        if self.num_new_tokens >= self.max_new_tokens:
            return FinishReason(FinishKind.LENGTH)
        return None

    def finish(self, reason: FinishReason, tokenizer: Tokenizer, *, precision: str) -> None:
        """Answer the caller with what has been sampled."""
        now = time.monotonic()
        started = self._started_at if self._started_at is not None else now
        self.reply.set_result(
            Completion(
                token_ids=self.token_ids.copy(),
                logprobs=self._logprobs_R[: self.num_new_tokens].copy(),
                text=self._text(reason, tokenizer),
                finish_reason=reason,
                version_spans=tuple(self._spans),
                precision=precision,
                prompt_tokens=len(self.prompt_ids),
                cached_tokens=self.cached_tokens,
                timings=CompletionTimings(started - self._submitted_at, now - self._submitted_at),
                sampling_mask=SamplingMask.of(self._kept_R) if self.params.return_sampling_mask else None,
                seen_pictures=self.pictures.seen,
                routed_experts=self._routed_experts(),
            )
        )

    def _routed_experts(self) -> RoutedExperts | None:
        if self.experts_so_far is None or not self.num_new_tokens:
            return None
        return RoutedExperts.of(self.experts_so_far()[: self.num_tokens - 1])

    def fail(self, error: BaseException) -> None:
        """Answer the caller with an error, unless it has been answered."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def _stop_string(self, tokenizer: Tokenizer) -> str | None:
        """Return the stop string that the newest token completed, the one that ends first."""
        # A character takes at least one byte, and a byte at most one token.
        longest = max(len(stop.encode()) for stop in self.params.stop)
        tail = self._decode(tokenizer, self.token_ids[-(longest + _TAIL_SPARE_TOKENS) :])
        if not any(stop in tail for stop in self.params.stop):
            return None
        matches = self._new_matches(tokenizer)
        return min(matches)[1] if matches else None

    def _new_matches(self, tokenizer: Tokenizer) -> list[tuple[int, str]]:
        """Return (end in the text, stop string) of those that end within the newest token's text."""
        text = self._decode(tokenizer, self.token_ids)
        before = self._decode(tokenizer, self.token_ids[:-1])
        settled = _common_length(before, text)
        matches = []
        for stop in self.params.stop:
            start = text.find(stop, max(0, settled - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), stop))
        return matches

    def _text(self, reason: FinishReason, tokenizer: Tokenizer) -> str:
        trim = not self.params.no_stop_trim
        if reason.kind is FinishKind.STOP and isinstance(reason.matched, str):
            end, stop = min(self._new_matches(tokenizer))
            return self._decode(tokenizer, self.token_ids)[: end - len(stop) if trim else end]
        if reason.kind is FinishKind.STOP and trim:
            return self._decode(tokenizer, self.token_ids[:-1])
        return self._decode(tokenizer, self.token_ids)

    def _decode(self, tokenizer: Tokenizer, token_ids: Sequence[int] | NDArray[np.int32]) -> str:
        if not len(token_ids):
            return ""
        return tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)


def _common_length(first: str, second: str) -> int:
    length = min(len(first), len(second))
    return next((index for index in range(length) if first[index] != second[index]), length)
