"""Conversations to be learned as they stand: their tokens, and which of them the assistant says.

Invariant: the tokens are those of one full render of the chat template, whatever is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.chat import Chat, Span
from rollfeed.errors import ConfigError, DataError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Message

STEP_LOSS_MASK = "step_loss_mask"
"""Key of an assistant's message: where it is 0, the turn is not learned."""
_PLAIN = {"role", "content", STEP_LOSS_MASK}
"""Keys of a turn without calls or thoughts of its own."""


class LossMaskType(StrEnum):
    """Chooses the assistant's turns that are learned; names as of slime, but for the first."""

    GENERIC = "generic"
    """All, with any template that goes on showing turns as they were said."""
    QWEN = "qwen"
    QWEN3 = "qwen3"
    """All, as they are shown at the end: without the thoughts that are left out of earlier ones."""
    DISTILL_QWEN = "distill_qwen"
    """The last."""


def conversation_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    mask_type: LossMaskType = LossMaskType.GENERIC,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return a conversation's token ids ``(N,)``, and 1.0 where the assistant says them and they are learned ``(N,)``.

    A turn is learned with the token that ends it. What the template puts before it, an opened thought included, is not,
    nor is a token that begins before the turn or ends behind it.

    Raises:
        ConfigError: If the template refuses the messages, a turn cannot be told from what is around it, or one is shown
            otherwise than it was said and the mask type does not allow for that.
        DataError: If nothing is learned.
    """
    chat = _OneConversation(tokenizer, tools=tools)
    text = chat.render(messages, add_generation_prompt=False)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    learned = [index for index in turns if messages[index].get(STEP_LOSS_MASK, 1)]
    if mask_type is LossMaskType.DISTILL_QWEN:
        learned = [index for index in learned if index == turns[-1]]
    spans = [_span(chat, text, messages, index, mask_type=mask_type) for index in learned]
    token_ids, offsets = tokenizer.encode_with_offsets(text)
    mask = np.zeros(len(token_ids), np.float32)
    starts, ends = offsets.T
    for span in spans:
        first, behind = (int(place) for place in np.searchsorted(starts, span))
        if behind > first and ends[behind - 1] > span.end:
            behind -= 1
        mask[first:behind] = 1.0
        if span.start < span.end and behind < len(token_ids) and int(token_ids[behind]) in tokenizer.eos_token_ids:
            mask[behind] = 1.0
    if not mask.any():
        raise DataError("the conversation has no turn of the assistant that is learned")
    return token_ids, mask


class _OneConversation(Chat):
    """Renders each beginning of a conversation once, however often it is looked at."""

    def __init__(self, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] | None) -> None:
        super().__init__(tokenizer, tools=tools)
        self._rendered: dict[tuple[object, ...], tuple[Sequence[Message], str]] = {}
        """By the identity of the messages, which are kept so that no other has it."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        key = (add_generation_prompt, *map(id, messages))
        if key not in self._rendered:
            text = super().render(messages, add_generation_prompt=add_generation_prompt)
            self._rendered[key] = (tuple(messages), text)
        return self._rendered[key][1]


def _span(chat: Chat, text: str, messages: Sequence[Message], index: int, *, mask_type: LossMaskType) -> Span:
    """Return where a turn is in the render of its conversation, having checked that it may be learned as it is."""
    said = messages[: index + 1]
    content = messages[index].get("content")
    if isinstance(content, str) and content and messages[index].keys() <= _PLAIN:
        # Most turns stand behind their generation prompt as they are, which two renders tell.
        asked = chat.render(said[:-1], add_generation_prompt=True)
        shown = asked + content
        is_plain = text.startswith(shown)
        if is_plain and mask_type is LossMaskType.GENERIC:
            is_plain = chat.render(said, add_generation_prompt=False).startswith(shown)
        if is_plain:
            return Span(len(asked), len(shown))
    span = chat.turn(text, messages, index)
    if mask_type is LossMaskType.GENERIC:
        _check_as_said(chat, said, text, span)
    return span


def _check_as_said(chat: Chat, said: Sequence[Message], text: str, span: Span) -> None:
    """Raise ConfigError unless a turn, and all before it, stand in a text as when it was said."""
    asked = chat.render(said[:-1], add_generation_prompt=True)
    shown = chat.render(said, add_generation_prompt=False)
    own = chat.turn(shown, said, len(said) - 1)
    if not text.startswith(asked) or text[span.start : span.end] != shown[own.start : own.end]:
        raise ConfigError(
            f"message {len(said) - 1}: the chat template goes on showing the turn otherwise than it was said: choose "
            f"mask type {LossMaskType.QWEN3} to learn it as it is shown then, or {LossMaskType.DISTILL_QWEN} for the "
            "last turn only"
        )
