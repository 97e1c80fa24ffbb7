"""A conversation under way: what was sent and sampled stays as it is, and only what is new is tokenised.

Where the chat template shows what was said before otherwise than it was said, the turns to come are another sample,
with the context that the template shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.dialogue import Dialogue, FollowUp, TurnPlace
from rollfeed.conversations.picture_places import with_marks
from rollfeed.errors import ConfigError
from rollfeed.protocols import PictureProcessor, RewrittenTurns, Tokenizer
from rollfeed.types import Message, Picture, Prompt


class Conversation:
    """Turns what a policy is told into the tokens that follow its last turn.

    Without messages in the prompt that began it, contents are appended as they are. ``rewritten`` says what is done
    where the template shows earlier turns otherwise than they were said.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        *,
        rewritten: RewrittenTurns = RewrittenTurns.FORK,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self._dialogue = Dialogue(tokenizer, tools=prompt.tools)
        self._rewritten = rewritten
        self._is_chat = prompt.messages is not None
        self._pictures = pictures
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
        self,
        said: NDArray[np.int32],
        messages: Sequence[Message],
        *,
        forms: Sequence[Message] = (),
        images: Sequence[Picture] = (),
        before: Sequence[Picture] = (),
    ) -> FollowUp:
        """Return what is sent from the end of a sampled turn to the opening of the next.

        Args:
            said: The turn, ``(T,)``.
            messages: What the policy is told.
            forms: The turn as a message with its calls, in each form that the template may show as it was said.
            images: Of the messages, a part for each.
            before: Of the conversation until then.

        Raises:
            ConfigError: As :meth:`Dialogue.go_on`, or if the pictures do not fit what the template shows.
        """
        if self._is_chat:
            told, self._place = self._dialogue.go_on(
                self._place, said, messages, forms=forms, rewritten=self._rewritten
            )
        else:
            mark = "" if self._pictures is None or not images else self._pictures.mark
            text = "".join(with_marks(message["content"], mark) for message in messages)
            told = FollowUp(self._dialogue.encode(text))
        shown = (*before, *images) if told.is_context else tuple(images)
        if not shown or self._pictures is None:
            return told
        try:
            token_ids = self._pictures.expand(told.token_ids, shown)
        except ValueError as error:
            raise ConfigError(f"what the policy is told: {error}") from error
        return replace(told, token_ids=token_ids, images=shown)
