"""A conversation under way: what was sent and sampled stays as it is, and only what is new is tokenised.

Where the chat template shows what was said before otherwise than it was said, the turns to come are another sample,
with the context that the template shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.chat import Chat, Suffix
from rollfeed.errors import ConfigError
from rollfeed.protocols import RewrittenTurns, Tokenizer
from rollfeed.types import Message, Prompt

_TURNS_RENDERED = 4
"""The first turns, for each of which the whole conversation is rendered; then, for every power of two."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The tokens that a policy is sent between two of its turns."""

    token_ids: NDArray[np.int32]
    """``(N,)``."""
    is_context: bool = False
    """Whether they are all that the policy is sent, instead of what was sent and sampled before."""
    rewrites: bool = False
    """Whether the chat template shows something before them otherwise than it was said."""


class Conversation:
    """Turns what a policy is told into the tokens that follow its last turn.

    A template is asked for the first question, the turn and what is told next, as if nothing had been between: so a
    turn costs the same however many there were. What the whole conversation shows is compared at ever larger distances;
    where that differs, the whole is rendered for each turn.

    Args:
        prompt: That began it; without messages, contents are appended as they are.
        tokenizer: The policy's.
        rewritten: What is done where the template shows earlier turns otherwise than they were said.
    """

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, *, rewritten: RewrittenTurns = RewrittenTurns.FORK
    ) -> None:
        self._tokenizer = tokenizer
        self._rewritten = rewritten
        self._chat = None if prompt.messages is None else Chat(tokenizer, tools=prompt.tools)
        self._messages: list[Message] = []
        self._shown = ""
        self._begin(prompt.messages or (), prompt.text)

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far, without the last turn while nothing follows it."""
        return tuple(self._messages)

    def begin(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Go on from other messages, such as a summary of those before, and return their tokens ``(N,)``.

        Raises:
            ConfigError: If there is no chat template, or it refuses the messages.
        """
        if self._chat is None:
            raise ConfigError("a conversation can only begin anew from a prompt with messages")
        self._begin(messages, self._chat.render(messages, add_generation_prompt=True))
        return self._encode(self._shown)

    def follow_up(
        self, said: NDArray[np.int32], messages: Sequence[Message], *, forms: Sequence[Message] = ()
    ) -> FollowUp:
        """Return what is sent from the end of a sampled turn to the opening of the next.

        A token that ended the turn and with which it would begin is not repeated.

        Args:
            said: The turn, ``(T,)``.
            messages: What the policy is told.
            forms: The turn as a message with its calls, in each form that the template may show as it was said.

        Raises:
            ConfigError: If the chat template refuses the conversation, or shows something of it otherwise than it was
                said and that is refused.
        """
        if self._chat is None:
            return FollowUp(self._encode("".join(str(message["content"]) for message in messages)))
        has_ended = bool(len(said)) and int(said[-1]) in self._tokenizer.eos_token_ids
        text = self._tokenizer.decode(said[:-1] if has_ended else said, skip_special_tokens=False)
        suffix = self._suffix(self._chat, text, [{"role": "assistant", "content": text}, *forms], messages)
        self._messages += [suffix.message, *messages]
        self._shown = self._shown + text + suffix.text if suffix.whole is None else suffix.whole
        if not suffix.extends:
            self._refuse_rewriting()
            if self._rewritten is RewrittenTurns.FORK and suffix.whole is not None:
                self._begin(self._messages, suffix.whole)
                return FollowUp(self._encode(suffix.whole), is_context=True, rewrites=True)
        token_ids = self._encode(suffix.text)
        is_repeated = has_ended and token_ids[:1] == said[-1:]
        return FollowUp(token_ids[1:] if is_repeated else token_ids, rewrites=not suffix.extends)

    def _begin(self, messages: Sequence[Message], shown: str) -> None:
        self._messages, self._shown = list(messages), shown
        self._first = (tuple(messages), shown)
        self._num_turns = 0
        self._is_local = True

    def _suffix(self, chat: Chat, text: str, forms: Sequence[Message], after: Sequence[Message]) -> Suffix:
        self._num_turns += 1
        near: Suffix | None = None
        if self._is_local and self._num_turns > 1:
            messages, shown = self._first
            try:
                near = chat.suffix(messages, shown + text, forms, after)
            except ConfigError:
                self._is_local = False
        is_rendered = self._num_turns <= _TURNS_RENDERED or self._num_turns.bit_count() == 1
        if near is not None and near.extends and not is_rendered:
            return replace(near, whole=self._shown + text + near.text)
        suffix = chat.suffix(self._messages, self._shown + text, forms, after)
        if near is not None and (near.extends, near.text) != (suffix.extends, suffix.text):
            self._is_local = False
        return suffix

    def _refuse_rewriting(self) -> None:
        if self._rewritten is RewrittenTurns.REFUSE:
            raise ConfigError(
                f"turn {self._num_turns}: the chat template shows what was said before otherwise than it was said: set "
                f"rollout.rewritten_turns to {RewrittenTurns.FORK}, which makes a sample of what comes then, or to "
                f"{RewrittenTurns.APPEND}, which goes on from what was said"
            )

    def _encode(self, text: str) -> NDArray[np.int32]:
        return self._tokenizer.encode(text, add_special_tokens=False)
