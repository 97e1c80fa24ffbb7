"""A conversation under way: what was sent and sampled stays as it is, and only what is new is tokenised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.chat import Chat
from rollfeed.protocols import Tokenizer
from rollfeed.types import Message, Prompt


class Conversation:
    """Turns what a policy is told into the tokens that follow its last turn.

    Args:
        prompt: That began it; without messages, contents are appended as they are.
        tokenizer: The policy's.
    """

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] = list(prompt.messages or ())
        self._chat = None if prompt.messages is None else Chat(tokenizer, tools=prompt.tools)

    def follow_up(self, said: NDArray[np.int32], messages: Sequence[Message]) -> NDArray[np.int32]:
        """Return the token ids ``(N,)`` from the end of a sampled turn to the opening of the next.

        A token that ended the turn and with which they would begin is not repeated.

        Args:
            said: The turn, ``(T,)``.
            messages: What the policy is told.

        Raises:
            ConfigError: If the chat template refuses the conversation.
        """
        if self._chat is None:
            return self._encode("".join(str(message["content"]) for message in messages))
        has_ended = bool(len(said)) and int(said[-1]) in self._tokenizer.eos_token_ids
        text = self._tokenizer.decode(said[:-1] if has_ended else said, skip_special_tokens=False)
        suffix = self._chat.suffix(self._messages, text, [{"role": "assistant", "content": text}], messages)
        self._messages += [suffix.message, *messages]
        token_ids = self._encode(suffix.text)
        return token_ids[1:] if has_ended and token_ids[:1] == said[-1:] else token_ids

    def _encode(self, text: str) -> NDArray[np.int32]:
        return self._tokenizer.encode(text, add_special_tokens=False)
