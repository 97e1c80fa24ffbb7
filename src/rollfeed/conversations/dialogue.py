"""Learns what a chat template does with conversations that go on, once for all that have the same tools.

A turn is asked for in a conversation of three messages that stands for the real one: so it costs the same however much
was said before. That a template shows no more of what was before is not believed but compared: the whole is rendered at
ever larger distances for each kind of conversation, wherever somebody speaks behind whom thoughts may be left out, and
by :meth:`Dialogue.check`. Where the two differ, the whole is rendered in each turn of that kind from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations.chat import Chat, Suffix
from rollfeed.conversations.syntax import CallSyntax
from rollfeed.conversations.text_pieces import TextPieces
from rollfeed.errors import ConfigError
from rollfeed.protocols import RewrittenTurns, Tokenizer
from rollfeed.types import Message, Picture

_TURNS_RENDERED = 4
"""The first turns, for each of which the whole conversation is rendered; then, for every power of two."""
_NOT_LOCAL = -1
_QUESTION: Message = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The tokens that a policy is sent between two of its turns."""

    token_ids: NDArray[np.int32]
    """``(N,)``."""
    is_context: bool = False
    """Whether they are all that the policy is sent, instead of what was sent and sampled before."""
    rewrites: bool = False
    """Whether the chat template shows something before them otherwise than it was said."""
    images: tuple[Picture, ...] = ()
    """Pictures that the tokens have room for."""


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """The opening of a turn in a conversation, which may go on from there in several ways."""

    before: TurnPlace | None
    """The opening of the turn before; None where everything is told here."""
    messages: tuple[Message, ...]
    """Since then: the turn in the form in which it was rendered, and what was told."""
    text: str
    """Since then: what was said, and what was sent to the opening."""
    kinds: frozenset[str] = frozenset()
    """What there was in the conversation that templates treat in different ways."""
    num_turns: int = 0
    """Since everything was told."""
    is_settled: bool = True
    """Whether all turns stayed as they were while somebody else than a tool spoke after them."""
    is_compared: bool = True
    """Whether the text is known to be that of the whole conversation, or known to differ."""

    def conversation(self) -> list[Message]:
        return [message for place in self._path() for message in place.messages]

    def shown(self) -> str:
        """Return what the policy was sent and said."""
        return "".join(place.text for place in self._path())

    def _path(self) -> Iterator[TurnPlace]:
        places, place = list[TurnPlace](), self
        while place.before is not None:
            places.append(place)
            place = place.before
        return reversed([*places, place])


class Dialogue:
    """The conversations of a model and its tools.

    Args:
        tokenizer: With a chat template.
        tools: Definitions of tools.
        template_kwargs: Variables of the template.
        syntax: What the template shows of tools, where messages may hold calls that were read out of turns, and their
            results; what it does not show is told in texts.
        pieces: Of the tokenizer, for conversations that have long texts in common: those are tokenised once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        syntax: CallSyntax | None = None,
        pieces: TextPieces | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._syntax = syntax
        self._pieces = pieces
        self._chat = Chat(tokenizer, tools=tools, template_kwargs=template_kwargs)
        self._small = Chat(tokenizer, tools=[_TOOL] if tools else None, template_kwargs=template_kwargs)
        self._asked: str | None = None
        self._deepest: dict[frozenset[str], int] = {}
        """For how many turns of each kind of conversation the small one was as the whole; or ``_NOT_LOCAL``."""

    def begin(self, messages: Sequence[Message]) -> TurnPlace:
        """Return the opening of the first turn after messages, all of which are told.

        Raises:
            ConfigError: If the template refuses them.
        """
        if self._syntax is not None:
            messages = self._syntax.introduced(self._syntax.adapted(messages), self._chat.tools or ())
        return TurnPlace(None, tuple(messages), self._chat.render(messages, add_generation_prompt=True))

    def go_on(
        self,
        place: TurnPlace,
        said: NDArray[np.int32],
        messages: Sequence[Message],
        *,
        forms: Sequence[Message] = (),
        rewritten: RewrittenTurns = RewrittenTurns.FORK,
    ) -> tuple[FollowUp, TurnPlace]:
        """Return what is sent from the end of a sampled turn to the opening of the next, and that opening.

        A token that ended the turn and with which it would begin is not repeated.

        Args:
            place: Where the turn was sampled.
            said: The turn, ``(T,)``.
            messages: What the policy is told.
            forms: The turn as a message with its calls, in each form that the template may show as it was said.
            rewritten: What is done where the template shows earlier turns otherwise than they were said.

        Raises:
            ConfigError: If the chat template refuses the conversation, or shows something of it otherwise than it was
                said and that is refused.
        """
        if self._syntax is not None:
            said_as = forms[-1] if forms else {"role": "assistant", "content": ""}
            messages = self._syntax.adapted([said_as, *messages])[1:]
        has_ended = bool(len(said)) and int(said[-1]) in self._tokenizer.eos_token_ids
        text = self._tokenizer.decode(said[:-1] if has_ended else said, skip_special_tokens=False)
        suffix, opening = self._opening(place, text, [{"role": "assistant", "content": text}, *forms], messages)
        if not suffix.extends:
            if rewritten is RewrittenTurns.REFUSE:
                raise ConfigError(_refusal(opening.num_turns))
            if suffix.whole is not None:
                begun = TurnPlace(None, (*place.conversation(), *opening.messages), suffix.whole)
                if rewritten is RewrittenTurns.FORK:
                    return FollowUp(self.encode(suffix.whole), is_context=True, rewrites=True), begun
                opening = replace(begun, kinds=opening.kinds, num_turns=opening.num_turns)
        token_ids = self.encode(suffix.text)
        is_repeated = has_ended and token_ids[:1] == said[-1:]
        return FollowUp(token_ids[1:] if is_repeated else token_ids, rewrites=not suffix.extends), opening

    def check(self, place: TurnPlace) -> bool:
        """Whether the whole conversation is shown as it was sent and said; if not, more is rendered from now on."""
        if place.is_compared:
            return True
        try:
            is_same = self._chat.render(place.conversation(), add_generation_prompt=True) == place.shown()
        except ConfigError:
            is_same = False
        known = self._deepest.get(place.kinds, 0)
        self._deepest[place.kinds] = max(known, place.num_turns) if is_same and known != _NOT_LOCAL else _NOT_LOCAL
        return is_same

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the tokens ``(N,)`` of rendered text."""
        if self._pieces is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._pieces.encode(text)

    def _opening(
        self, place: TurnPlace, text: str, forms: Sequence[Message], after: Sequence[Message]
    ) -> tuple[Suffix, TurnPlace]:
        num_turns, kinds = place.num_turns + 1, place.kinds | _kinds(text, forms, after)
        is_heard = any(message["role"] != "tool" for message in after)
        near, known = None, self._deepest.get(kinds, 0)
        if known != _NOT_LOCAL:
            near = self._near(text, forms, after)
        is_due = num_turns > known and (num_turns <= _TURNS_RENDERED or num_turns.bit_count() == 1)
        is_surprising = is_heard and not place.is_settled
        opening = TurnPlace(place, (), "", kinds, num_turns, is_settled=is_heard, is_compared=False)
        if near is None or not near.extends or is_due or is_surprising:
            suffix = self._chat.suffix(place.conversation(), place.shown() + text, forms, after)
            opening = replace(opening, is_compared=True)
            if near is None or (near.extends, near.text) == (suffix.extends, suffix.text):
                self._deepest[kinds] = _NOT_LOCAL if near is None else max(known, num_turns)
            elif not is_surprising:
                self._deepest[kinds] = _NOT_LOCAL
        else:
            suffix = near
        return suffix, replace(opening, messages=(suffix.message, *after), text=text + suffix.text)

    def _near(self, text: str, forms: Sequence[Message], after: Sequence[Message]) -> Suffix | None:
        """Return what follows a turn in a conversation of a question, the turn and what is told next."""
        try:
            if self._asked is None:
                self._asked = self._small.render([_QUESTION], add_generation_prompt=True)
            return self._small.suffix([_QUESTION], self._asked + text, forms, after)
        except ConfigError:
            return None


def _kinds(text: str, forms: Sequence[Message], after: Sequence[Message]) -> frozenset[str]:
    """Return what a turn and the messages after it have that templates treat in different ways."""
    told = {str(message["role"]) for message in after}
    has = {"thought": "think>" in text, "call": len(forms) > 1, "space": text.strip() != text}
    return frozenset(told | {kind for kind, there in has.items() if there})


def _refusal(turn: int) -> str:
    return (
        f"turn {turn}: the chat template shows what was said before otherwise than it was said: set "
        f"rollout.rewritten_turns to {RewrittenTurns.FORK}, which makes a sample of what comes then, or to "
        f"{RewrittenTurns.APPEND}, which goes on from what was said"
    )
