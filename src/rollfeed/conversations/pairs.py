"""Rows that have two answers, of which one is preferred.

Axes: N tokens, of which the first P are the prompt's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from rollfeed.conversations.answered import AnsweredPrompt, answer_tokens
from rollfeed.conversations.learned import conversation_tokens
from rollfeed.errors import DataError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Prompt

PAIR = "preference_pair"
"""Entry of a prompt's metadata: ``chosen`` and ``rejected``, texts or messages behind the prompt's, and ``margin``."""


def preference_prompt(
    prompt: Prompt, *, tokenizer: Tokenizer, chosen_key: str, rejected_key: str, margin_key: str | None = None
) -> AnsweredPrompt:
    """Return a row's prompt with its pair in the metadata, and the longer of its answers.

    Answers are texts, or messages that may begin with the prompt's own.

    Raises:
        DataError: If an answer is missing or no answer, both are equal, or the margin is no number.
        ConfigError: As :func:`conversation_tokens`.
    """
    metadata = dict(prompt.metadata)
    chosen, rejected = (_answer(metadata.pop(key, None), key, prompt) for key in (chosen_key, rejected_key))
    if chosen == rejected:
        raise DataError(f"columns {chosen_key!r} and {rejected_key!r} have the same answer, which teaches nothing")
    margin = 0.0 if margin_key is None else metadata.pop(margin_key, 0.0)
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not math.isfinite(margin):
        raise DataError(f"column {margin_key!r} is {margin!r:.80}; a margin is a finite number")
    pair = {"chosen": chosen, "rejected": rejected, "margin": float(margin)}
    shown = paired_answers(replace(prompt, metadata={**metadata, PAIR: pair}), tokenizer=tokenizer)
    return max(shown, key=lambda each: len(each.token_ids))


def paired_answers(prompt: Prompt, *, tokenizer: Tokenizer) -> tuple[AnsweredPrompt, AnsweredPrompt]:
    """Return the preferred answer to a prompt and the other one; the prompt's tokens are those that both begin with.

    Raises:
        ConfigError: As :func:`conversation_tokens`.
        DataError: If nothing is common to both.
    """
    pair, messages = prompt.metadata[PAIR], prompt.messages
    if messages is None:
        num_before = len(prompt.token_ids)
        whole = [np.concatenate([prompt.token_ids, answer_tokens(pair[name], tokenizer)]) for name in _NAMES]
    else:
        whole = []
        for name in _NAMES:
            ids, mask = conversation_tokens(tokenizer, (*messages, *pair[name]), tools=prompt.tools)
            whole.append(ids[: int(np.flatnonzero(mask)[-1]) + 1])
        shortest = min(map(len, whole)) - 1
        differs = np.flatnonzero(whole[0][:shortest] != whole[1][:shortest])
        num_before = int(differs[0]) if len(differs) else shortest
        before = whole[0][:num_before]
        before.setflags(write=False)
        prompt = replace(prompt, token_ids=before, text=tokenizer.decode(before, skip_special_tokens=False))
    if num_before < 1:
        raise DataError("the two answers have no prompt before them")
    first, second = (AnsweredPrompt(prompt, ids, _mask(len(ids), num_before)) for ids in whole)
    return first, second


_NAMES = ("chosen", "rejected")


def _mask(length: int, num_before: int) -> Any:
    return (np.arange(length) >= num_before).astype(np.float32)


def _answer(value: Any, key: str, prompt: Prompt) -> Any:
    """Return an answer as it is stored: a text where the prompt is one, else the messages behind the prompt's."""
    if isinstance(value, str) and value:
        return value if prompt.messages is None else [{"role": "assistant", "content": value}]
    if not isinstance(value, list) or not all(isinstance(each, dict) and "role" in each for each in value):
        raise DataError(f"column {key!r} is {value!r:.80}; an answer is a text, or a list of messages")
    if prompt.messages is None:
        raise DataError(f"column {key!r} has messages, which need the chat template: set apply_chat_template = true")
    own = [{"role": each["role"], "content": each.get("content")} for each in prompt.messages]
    begins = [{"role": each["role"], "content": each.get("content")} for each in value[: len(own)]]
    rest = value[len(own) :] if begins == own else value
    if not rest or rest[-1]["role"] != "assistant":
        raise DataError(f"column {key!r} does not end with a turn of the assistant behind the prompt")
    return rest
