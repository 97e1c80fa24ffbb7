"""A conversation under way: what was sent and sampled stays as it is, and only what is new is tokenised.

Where the chat template shows what was said before otherwise than it was said, the turns to come are another sample,
with the context that the template shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.dialogue import Dialogue, FollowUp, TurnPlace
from rollfeed.errors import ConfigError
from rollfeed.protocols import RewrittenTurns, Tokenizer
from rollfeed.types import Message, Prompt


class Conversation:
    """Turns what a policy is told into the tokens that follow its last turn.

    Without messages in the prompt that began it, contents are appended as they are. ``rewritten`` says what is done
    where the template shows earlier turns otherwise than they were said.
    """

    def __init__(
        self, prompt: Prompt, tokenizer: Tokenizer, *, rewritten: RewrittenTurns = RewrittenTurns.FORK
    ) -> None:
        self._dialogue = Dialogue(tokenizer, tools=prompt.tools)
        self._rewritten = rewritten
        self._is_chat = prompt.messages is not None
        self._place = TurnPlace(None, tuple(prompt.messages or ()), prompt.text)

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far, without the last turn while nothing follows it."""
        return tuple(self._place.conversation())

    def begin(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Go on from other messages, such as a summary of those before, and return their tokens ``(N,)``.

        Raises:
            ConfigError: If there is no chat template, or it refuses the messages.
        """
        if not self._is_chat:
            raise ConfigError("a conversation can only begin anew from a prompt with messages")
        self._place = self._dialogue.begin(messages)
        return self._dialogue.encode(self._place.text)

    def follow_up(
        self, said: NDArray[np.int32], messages: Sequence[Message], *, forms: Sequence[Message] = ()
    ) -> FollowUp:
        """Return what is sent from the end of a sampled turn to the opening of the next.

        Args:
            said: The turn, ``(T,)``.
            messages: What the policy is told.
            forms: The turn as a message with its calls, in each form that the template may show as it was said.

        Raises:
            ConfigError: As :meth:`Dialogue.go_on`.
        """
        if not self._is_chat:
            return FollowUp(self._dialogue.encode("".join(str(message["content"]) for message in messages)))
        told, self._place = self._dialogue.go_on(self._place, said, messages, forms=forms, rewritten=self._rewritten)
        return told
