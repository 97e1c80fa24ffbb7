"""Rows of a data set that show what is to be said: a conversation, or a text and the one that follows it.

Axes: N tokens, of which the first P are the prompt's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.learned import LossMaskType, conversation_tokens
from rollfeed.errors import DataError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Prompt


class AnsweredPrompt(NamedTuple):
    """A prompt with its answer, and which tokens of it are learned."""

    prompt: Prompt
    """Its token ids are those before the first that is learned. ``(P,)``."""
    token_ids: NDArray[np.int32]
    """Of the whole row. ``(N,)``."""
    loss_mask: NDArray[np.float32]
    """1.0 where a token is learned. ``(N,)``."""

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The tokens from the first that is learned on, a view. ``(N - P,)``."""
        return self.token_ids[len(self.prompt.token_ids) :]

    @property
    def response_mask(self) -> NDArray[np.float32]:
        """The mask of the same tokens, a view. ``(N - P,)``."""
        return self.loss_mask[len(self.prompt.token_ids) :]


def answered_prompt(prompt: Prompt, *, tokenizer: Tokenizer, mask_type: LossMaskType) -> AnsweredPrompt:
    """Return what is learned of a prompt that has its answer.

    Its messages are the whole conversation, but for the last answer where that is the label. Without messages, its
    tokens are followed by those of the label.

    Raises:
        ConfigError: As :func:`conversation_tokens`.
        DataError: If nothing is learned, or nothing comes before it.
    """
    if prompt.messages is None:
        ids = answer_tokens(prompt.label, tokenizer)
        mask = np.concatenate([np.zeros(len(prompt.token_ids), np.float32), np.ones(len(ids), np.float32)])
        return AnsweredPrompt(prompt, np.concatenate([prompt.token_ids, ids]), mask)
    messages = prompt.messages
    if isinstance(prompt.label, str) and messages[-1]["role"] != "assistant":
        messages = (*messages, {"role": "assistant", "content": prompt.label})
    if messages[0]["role"] == "assistant":
        raise DataError("the conversation begins with a turn of the assistant, and nothing comes before it")
    ids, mask = conversation_tokens(tokenizer, messages, tools=prompt.tools, mask_type=mask_type)
    num_before = int(np.argmax(mask))
    ids.setflags(write=False)
    text = tokenizer.decode(ids[:num_before], skip_special_tokens=False)
    return AnsweredPrompt(replace(prompt, messages=messages, text=text, token_ids=ids[:num_before]), ids, mask)


def answer_tokens(label: object, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the token ids of a label as a model says it, the token that ends it included, ``(N,)``.

    Raises:
        DataError: If it is no text, or nothing ends it.
    """
    if not isinstance(label, str):
        raise DataError("there is no label to teach, which is a text: set label_key to a column with one")
    if not tokenizer.eos_token_ids:
        raise DataError("the tokenizer names no token that ends a response; use another checkpoint")
    end = np.array(tokenizer.eos_token_ids[:1], np.int32)
    return np.concatenate([tokenizer.encode(label, add_special_tokens=False), end])
