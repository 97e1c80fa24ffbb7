"""Requests to an engine, and its replies.

Axes: P prompt tokens, R response tokens, M tokens that they were drawn from, N tokens with C choices of experts each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.types.fields import Int32
from rollfeed.types.pictures import SeenPicture


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The settings that one response is sampled with; names are SGLang's.

    Raises:
        ValueError: If a value is outside its range.
    """

    max_new_tokens: int
    """At least 0; 0 asks for nothing."""
    temperature: float = 1.0
    """At least 0; 0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps everything."""
    top_k: int = -1
    """At least 1, or -1 for the whole vocabulary."""
    min_new_tokens: int = 0
    """Stop tokens cannot be sampled, and stop strings are not looked for, before this many tokens."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off. Applied to tokens of prompt and response (CTRL, arXiv:1909.05858, section 4.1)."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence ids."""
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    spaces_between_special_tokens: bool = False
    seed: int | None = None
    """64-bit seed of this response; None draws one from the operating system."""
    return_sampling_mask: bool = False
    """Return the tokens that each one was drawn from, and log-probabilities among these."""
    return_routed_experts: bool = False
    """Return the experts that the tokens were computed with."""

    def __post_init__(self) -> None:
        # Made once per rollout: nothing is written out before something is wrong.
        if not self.max_new_tokens >= 0:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: must be at least 0")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: must be finite and at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        if not (self.top_k == -1 or self.top_k >= 1):
            raise ValueError(f"top_k = {self.top_k}: must be at least 1, or -1")
        if not self.min_new_tokens >= 0:
            raise ValueError(f"min_new_tokens = {self.min_new_tokens}: must be at least 0")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty}: must be finite and above 0")
        if not all(self.stop):
            raise ValueError("stop: an empty string would stop everything")


class FinishKind(StrEnum):
    """Why an engine stopped."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FinishReason(NamedTuple):
    """Why an engine stopped, and at what."""

    kind: FinishKind
    matched: int | str | None = None
    """The stop token id or stop string, for STOP."""


class VersionSpan(NamedTuple):
    """Response tokens ``start`` to ``end`` (exclusive) were sampled by ``policy_version``."""

    start: Int32
    end: Int32
    policy_version: int


class CompletionTimings(NamedTuple):
    """The seconds of one completion, by what they went into."""

    queue_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The tokens that each of R response tokens was drawn from, M of them side by side.

    Raises:
        ValueError: If the lengths do not add up to M.
    """

    lengths: NDArray[np.int32]
    """How many tokens each one was drawn from; 0 stands for the whole vocabulary, and for a token that was not drawn.
    ``(R,)``."""
    token_ids: NDArray[np.int32]
    """Their ids, one token's behind the other's. ``(M,)``."""

    def __post_init__(self) -> None:
        if (self.lengths < 0).any() or int(self.lengths.sum(dtype=np.int64)) != len(self.token_ids):
            raise ValueError(f"sampling mask: {len(self.token_ids)} tokens are not {self.lengths.sum()} by its lengths")

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | NDArray[np.int32]]) -> SamplingMask:
        """Return what each row's tokens are for one response token."""
        arrays = [np.asarray(row, np.int32) for row in rows]
        return cls(np.array(list(map(len, arrays)), np.int32), np.concatenate([np.empty(0, np.int32), *arrays]))

    @classmethod
    def without(cls, num_tokens: int) -> SamplingMask:
        """Return the mask of tokens that were drawn from the whole vocabulary, or not drawn."""
        return cls(np.zeros(num_tokens, np.int32), np.empty(0, np.int32))

    @classmethod
    def joined(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the mask of what lies one behind the other."""
        nothing = np.empty(0, np.int32)
        lengths = np.concatenate([nothing, *(mask.lengths for mask in masks)])
        return cls(lengths, np.concatenate([nothing, *(mask.token_ids for mask in masks)]))

    @property
    def positions(self) -> NDArray[np.int64]:
        """The response token that each is for. ``(M,)``."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def at(self, positions: NDArray[np.int64]) -> SamplingMask:
        """Return the mask of some response tokens, in ascending order."""
        chosen = np.zeros(len(self.lengths), np.bool_)
        chosen[positions] = True
        return SamplingMask(self.lengths[positions], self.token_ids[np.repeat(chosen, self.lengths)])

    def split(self) -> list[NDArray[np.int32]]:
        """Return what each response token was drawn from, R arrays."""
        return np.split(self.token_ids, np.cumsum(self.lengths))[:-1]

    def check(self, token_ids: NDArray[np.int32]) -> None:
        """Raise ValueError unless each of the response's tokens is one of those that it was drawn from."""
        if len(self.lengths) != len(token_ids):
            raise ValueError(f"sampling mask of {len(self.lengths)} tokens for {len(token_ids)}")
        positions = self.positions
        found = np.bincount(positions[self.token_ids == token_ids[positions]], minlength=len(token_ids))
        if ((self.lengths > 0) & (found == 0)).any():
            raise ValueError("sampling mask: a token is not among those that it was drawn from")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of N tokens from a sequence's first on, C choices each; of its last token nothing is computed.

    Raises:
        ValueError: If the bytes are not of whole tokens.
    """

    per_token: Int32
    """C: layers, those with experts or all of the model, times experts a layer."""
    width: Int32
    """Bytes an expert's number: 1, or 2 where one is above 255."""
    content: NDArray[np.uint8]
    """The experts' numbers, little-endian, layer after layer, token after token. ``(N * C * width,)``."""

    def __post_init__(self) -> None:
        if self.per_token < 1 or self.width not in (1, 2) or len(self.content) % (self.per_token * self.width):
            raise ValueError(
                f"routed experts: {len(self.content)} bytes are not tokens of {self.per_token} choices of "
                f"{self.width} bytes"
            )

    @classmethod
    def of(cls, experts_NC: NDArray[np.integer]) -> RoutedExperts:
        """Return numbers in their smallest form, ``(N, C)``; raises ValueError if some are no experts'."""
        largest = int(experts_NC.max(initial=0))
        if int(experts_NC.min(initial=0)) < 0 or largest >= 1 << 16:
            raise ValueError(f"routed experts: numbers from {experts_NC.min()} to {largest}")
        width = 2 if largest > 255 else 1
        content = np.ascontiguousarray(experts_NC, f"<u{width}").reshape(-1).view(np.uint8)
        return cls(experts_NC.shape[1], width, content)

    @classmethod
    def joined(cls, parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
        """Return those of a sequence, given ever longer beginnings of it: of each what the ones before lack.

        What a token was sampled with stays, whatever has computed it again since. Raises ValueError if they are of
        different models.
        """
        whole: RoutedExperts | None = None
        for part in parts:
            if whole is None or part is None:
                whole = whole or part
            elif whole.per_token != part.per_token:
                raise ValueError(f"routed experts: {part.per_token} choices a token go on from {whole.per_token}")
            elif part.num_tokens > whole.num_tokens:
                whole = cls.of(np.concatenate([whole.numbers, part.numbers[whole.num_tokens :]]))
        return whole

    @property
    def num_tokens(self) -> int:
        """Tokens that there are experts of, N."""
        return len(self.content) // (self.per_token * self.width)

    @property
    def numbers(self) -> NDArray[np.uint16]:
        """The experts' numbers, ``(N, C)``."""
        found = np.ascontiguousarray(self.content).view(f"<u{self.width}")
        return found.reshape(-1, self.per_token).astype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One engine reply: R sampled tokens.

    Raises:
        ValueError: If logprobs are not R long, the spans do not cover exactly the R tokens, or a token is not in its
            sampling mask.
    """

    token_ids: NDArray[np.int32]
    """Sampled ids, a sampled stop token included. ``(R,)``."""
    logprobs: NDArray[np.float32]
    """Natural-log probability in the distribution sampled from. ``(R,)``."""
    text: str
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    precision: str
    """What the engine computed in, for example ``fp32``."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were reused."""
    timings: CompletionTimings
    sampling_mask: SamplingMask | None = None
    """None where it was not asked for."""
    seen_pictures: tuple[SeenPicture, ...] | None = None
    """What the engine says of the pictures that it has seen; None where it says nothing."""
    routed_experts: RoutedExperts | None = None
    """Of all tokens of prompt and response but the last one; None where they were not asked for, or none is sampled."""

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.logprobs.shape or self.token_ids.ndim != 1:
            raise ValueError(f"{self.token_ids.shape} token ids but {self.logprobs.shape} logprobs")
        check_spans(self.version_spans, len(self.token_ids))
        if self.sampling_mask is not None:
            self.sampling_mask.check(self.token_ids)


class EngineLoad(NamedTuple):
    """Requests inside an engine right now."""

    running: int
    waiting: int


def joined_spans(parts: Iterable[tuple[int, Sequence[VersionSpan]]]) -> tuple[VersionSpan, ...]:
    """Return the spans of a response from those of its parts, each given with its number of tokens."""
    spans: list[VersionSpan] = []
    offset = 0
    for num_tokens, part in parts:
        for start, end, version in part:
            start, end = start + offset, end + offset
            if spans and spans[-1].policy_version == version:
                start = spans.pop().start
            spans.append(VersionSpan(start, end, version))
        offset += num_tokens
    return tuple(spans)


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Raise ValueError unless ``spans`` cover 0 to ``length`` without gap or overlap."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise ValueError(f"version spans {list(spans)} do not cover {length} response tokens in order")
        position = span.end
    if position != length:
        raise ValueError(f"version spans {list(spans)} cover {position} of {length} response tokens")
