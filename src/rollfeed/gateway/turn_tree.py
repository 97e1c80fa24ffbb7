"""The sampled turns of a session as a tree, and the tokens that a history means in it.

Invariant: the tokens of a turn stay as they were sampled, and so do those that it was sampled after. A history whose
turns are all known goes on from their tokens; any other is rendered whole, as a context of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.chat_apis.shown_pictures import hashes_in
from rollfeed.conversations import Dialogue, TurnPlace
from rollfeed.errors import ConfigError
from rollfeed.gateway.histories import History, thoughts_fit
from rollfeed.protocols import Matching, PictureProcessor, RewrittenTurns
from rollfeed.types import Completion, Message, Picture


@dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """A sampled turn."""

    number: int
    """Of its session, from 0, in the order in which they ended."""
    parent: Turn | None
    """The last turn of the history that asked for it."""
    context: NDArray[np.int32]
    """What was sent: all of it, or what follows the parent where that is gone on from. ``(N,)``."""
    goes_on: bool
    """Whether the context follows the parent's tokens."""
    place: TurnPlace
    """Its opening in the conversation."""
    told: Sequence[Message]
    """Messages of the history that asked for it: those after the parent, or all where it does not go on from that."""
    follows: bool
    """Whether they are those after the parent."""
    num_messages: int
    """Of the history that asked for it."""
    history: bytes
    """Digest of that history."""
    digest: bytes
    """Digest of that history and this turn."""
    alone: bytes
    """Digest of the turn."""
    message: Message
    """As it was returned."""
    completion: Completion
    images: tuple[Picture, ...] = ()
    """Those that have their places in the context."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What it takes to answer the same request again; JSON values."""
    num_followers: int = 0
    """Turns whose histories end with it."""

    @property
    def token_parent(self) -> Turn | None:
        """The turn whose tokens its own follow."""
        return self.parent if self.goes_on else None

    def conversation(self) -> list[Message]:
        """Return the history that asked for it, as it was first sent, and the turn."""
        pieces, turn = list[Sequence[Message]](), self
        while turn.follows and turn.parent is not None:
            pieces += [[turn.message], turn.told]
            turn = turn.parent
        pieces += [[turn.message], turn.told]
        return [message for piece in reversed(pieces) for message in piece]

    def context_images(self) -> tuple[Picture, ...]:
        """Return the pictures that have their places in all that was sent for it."""
        shown, before = [self.images], self.token_parent
        while before is not None:
            shown.append(before.images)
            before = before.token_parent
        return tuple(chain.from_iterable(reversed(shown)))

    def context_ids(self) -> NDArray[np.int32]:
        """Return all tokens that were sent for it, ``(P,)``."""
        return np.concatenate(self._pieces())

    def context_and_turn(self, following: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return all tokens that were sent for it, its own, and what follows."""
        return np.concatenate([*self._pieces(), self.completion.token_ids, following])

    def _pieces(self) -> list[NDArray[np.int32]]:
        pieces = [self.context]
        before = self.token_parent
        while before is not None:
            pieces += [before.completion.token_ids, before.context]
            before = before.token_parent
        return pieces[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The tokens that the policy is sent for a history."""

    history: History
    parent: Turn | None
    """The last turn of the history that was sampled here, as far as nothing before it is unknown."""
    context: NDArray[np.int32]
    """As :attr:`Turn.context`."""
    goes_on: bool
    """As :attr:`Turn.goes_on`."""
    place: TurnPlace
    told: Sequence[Message]
    """As :attr:`Turn.told`."""
    follows: bool
    """As :attr:`Turn.follows`."""
    token_ids: NDArray[np.int32]
    """All of them. ``(P,)``."""
    images: tuple[Picture, ...]
    """As :attr:`Turn.images`."""
    is_fork: bool
    """Whether turns were rendered anew in a context of its own."""
    num_lost_tokens: int
    """Sampled tokens that the context shows as the tokenizer makes them of their text."""

    def all_images(self) -> tuple[Picture, ...]:
        """Return the pictures that have their places in all tokens."""
        before = self.parent.context_images() if self.goes_on and self.parent is not None else ()
        return (*before, *self.images)


class TurnTree:
    """The turns of a session.

    ``rewritten`` says what is done where the template shows earlier turns otherwise than they were said; ``processor``
    gives pictures their places.
    """

    def __init__(
        self, *, matching: Matching, rewritten: RewrittenTurns, processor: PictureProcessor | None = None
    ) -> None:
        self._matching = matching
        self._rewritten = rewritten
        self._processor = processor
        self.pictures: dict[str, Picture] = {}
        """Those that messages show, by their hashes."""
        self.turns: list[Turn] = []
        self._by_digest: dict[bytes, list[Turn]] = {}
        self._sizes: dict[bytes, int] = {}
        """Tokens of turns, by their digests alone."""

    def open(self, history: History, dialogue: Dialogue) -> Opening:
        """Return what the policy is sent for a history.

        Raises:
            ConfigError: If the chat template refuses the messages or shows no places for their pictures, or shows
                earlier turns otherwise than they were said and that is refused.
        """
        parent, num_known = self._longest(history)
        num_turns = len(history.beginnings)
        told, follows = history.messages, parent is not None and num_known == num_turns
        if parent is not None and follows:
            told = told[history.beginnings[-1].num_messages :]
            said, forms = parent.completion.token_ids, [parent.message] if parent.message.get("tool_calls") else []
            follow_up, place = dialogue.go_on(parent.place, said, told, forms=forms, rewritten=self._rewritten)
            if not follow_up.is_context:
                context, images = self._with_pictures(follow_up.token_ids, told)
                return Opening(
                    history=history,
                    parent=parent,
                    context=context,
                    goes_on=True,
                    place=place,
                    told=told,
                    follows=True,
                    token_ids=parent.context_and_turn(context),
                    images=images,
                    is_fork=False,
                    num_lost_tokens=0,
                )
            token_ids = follow_up.token_ids
        else:
            place = dialogue.begin(history.messages)
            token_ids = dialogue.encode(place.text)
        token_ids, images = self._with_pictures(token_ids, history.messages)
        return Opening(
            history=history,
            parent=parent,
            context=token_ids,
            goes_on=False,
            place=place,
            told=told,
            follows=follows,
            token_ids=token_ids,
            images=images,
            is_fork=bool(self.turns) and num_turns > 0,
            num_lost_tokens=sum(self._sizes.get(each.turn, 0) for each in history.beginnings),
        )

    def add(
        self, opening: Opening, completion: Completion, message: Message, about: Mapping[str, Any], *, number: int
    ) -> Turn:
        """Append the turn that was sampled at an opening; its number is above all others."""
        beginning = opening.history.extended(message, self._matching)
        turn = Turn(
            number=number,
            parent=opening.parent,
            context=opening.context,
            goes_on=opening.goes_on,
            place=opening.place,
            told=opening.told,
            follows=opening.follows,
            num_messages=len(opening.history.messages),
            history=opening.history.digest,
            digest=beginning.digest,
            alone=beginning.turn,
            message=message,
            completion=completion,
            images=opening.images,
            about=about,
        )
        self.put(turn)
        return turn

    def put(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._by_digest.setdefault(turn.digest, []).append(turn)
        self._sizes[turn.alone] = len(turn.completion.token_ids)
        self.pictures.update((picture.content_hash, picture) for picture in turn.images)
        if turn.parent is not None:
            turn.parent.num_followers += 1

    def _with_pictures(
        self, token_ids: NDArray[np.int32], messages: Sequence[Message]
    ) -> tuple[NDArray[np.int32], tuple[Picture, ...]]:
        """Return the tokens of messages with those of their pictures. Raises ConfigError if they do not fit."""
        images = tuple(self.pictures[shown] for message in messages for shown in hashes_in(message))
        if not images or self._processor is None:
            return token_ids, ()
        try:
            return self._processor.expand(token_ids, images), images
        except ValueError as error:
            raise ConfigError(f"what the chat template shows of the messages: {error}") from error

    def _longest(self, history: History) -> tuple[Turn | None, int]:
        """Return the turn that ends the longest known beginning of a history, and how many turns that has."""
        for num_turns in range(len(history.beginnings), 0, -1):
            for turn in reversed(self._by_digest.get(history.beginnings[num_turns - 1].digest, ())):
                if _thoughts_fit(turn, history.messages):
                    return turn, num_turns
        return None, 0


def _thoughts_fit(last: Turn, messages: Sequence[Message]) -> bool:
    """Whether the turns of a path have the thoughts that a history has in their places."""
    turn: Turn | None = last
    while turn is not None:
        if not thoughts_fit(messages[turn.num_messages], turn.message):
            return False
        turn = turn.parent
    return True
