"""The policy that sessions are answered with, how it is sampled, and the bounds of a session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollfeed.chat_apis import ApiError, Asked, ErrorKind
from rollfeed.conversations import CallSyntax, Dialogue, TextPieces, call_syntax
from rollfeed.gateway.histories import digest_of
from rollfeed.protocols import CallFormat, Matching, PictureInput, RewrittenTurns, Tokenizer
from rollfeed.types import Completion, RoutedExperts, SamplingMask, SamplingParams, joined_spans

_MOST_DIALOGUES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Bounds of one session; a request beyond them is refused."""

    max_turns: int = 10_000
    max_tokens: int = 2**31 - 1
    """Sampled in all of its turns."""
    max_seconds: float = 86_400.0
    """Since it was opened."""
    max_body_bytes: int = 32 * 1024**2
    """Of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """The policy that answers, and how."""

    tokenizer: Tokenizer
    context_length: int
    """Tokens of a request and its answer together."""
    params: SamplingParams
    """What is not asked for otherwise; ``max_new_tokens`` is the most of a turn."""
    models: tuple[str, ...]
    """Names of the policy, the first one is shown; it has any name where there are none."""
    takes_sampling: bool = True
    """Whether requests choose how they are sampled; otherwise they choose where turns end, and no more."""
    matching: Matching = Matching.LENIENT
    rewritten: RewrittenTurns = RewrittenTurns.FORK
    picture_input: PictureInput | None = None
    """The way of pictures into its prompts; None where it takes none."""

    def params_for(self, asked: Asked, *, most: int) -> SamplingParams:
        """Return how a request is sampled, in at most so many tokens.

        Raises:
            ApiError: If it asks for what there is not.
        """
        default = replace(
            self.params, max_new_tokens=most, min_new_tokens=min(self.params.min_new_tokens, most), seed=None
        )
        if self.takes_sampling:
            return asked.sampling(default)
        wanted = asked.max_new_tokens
        return replace(
            default,
            max_new_tokens=most if wanted is None else min(most, wanted),
            stop=tuple(dict.fromkeys((*default.stop, *asked.stop))),
        )


class Dialogues:
    """The conversations of a tokenizer, by tools and variables of the template; those that are used stay."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: OrderedDict[bytes, Dialogue] = OrderedDict()
        self._pieces = TextPieces(tokenizer)

    @property
    def syntax(self) -> CallSyntax:
        """The way in which the policy writes calls."""
        return call_syntax(self.tokenizer, CallFormat.AUTO)

    def of(self, tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> tuple[bytes, Dialogue]:
        """Return the conversations with these tools and variables of the template, and their digest."""
        manner = digest_of([tools, template_kwargs]) if tools or template_kwargs else b""
        if manner in self._known:
            self._known.move_to_end(manner)
        else:
            self._known[manner] = Dialogue(
                self.tokenizer,
                tools=tools or None,
                template_kwargs=template_kwargs or None,
                syntax=self.syntax,
                pieces=self._pieces,
            )
            if len(self._known) > _MOST_DIALOGUES:
                self._known.popitem(last=False)
        return manner, self._known[manner]


def refused(message: str) -> ApiError:
    """Return the error of a session that is at one of its bounds."""
    return ApiError(message, kind=ErrorKind.PERMISSION, code="session_limit")


def joined(parts: Sequence[Completion], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Completion:
    """Return the completion of a turn that was sampled in parts, each from where the one before was aborted."""
    if len(parts) == 1:
        return parts[0]
    token_ids = np.concatenate([part.token_ids for part in parts])
    masks = [part.sampling_mask for part in parts if part.sampling_mask is not None]
    return replace(
        parts[-1],
        token_ids=token_ids,
        logprobs=np.concatenate([part.logprobs for part in parts]),
        # A character may be split between two parts, so their texts cannot simply be joined.
        text=tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
        version_spans=joined_spans((len(part.token_ids), part.version_spans) for part in parts),
        prompt_tokens=parts[0].prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        sampling_mask=SamplingMask.joined(masks) if masks else None,
        routed_experts=RoutedExperts.joined(part.routed_experts for part in parts),
    )
