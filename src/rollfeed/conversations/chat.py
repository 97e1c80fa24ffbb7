"""Finds out what a chat template puts between two sampled turns, and where it shows each turn.

Everything is read off full renders of the template, which differ in one place: a mark stands for what the assistant
says. So nothing is known of any template, and what cannot be found is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollfeed.conversations.picture_places import num_pictures
from rollfeed.errors import ConfigError
from rollfeed.protocols import Tokenizer
from rollfeed.types import Message

_MARK = "rollfeedturn"
_MARKED: Message = {"role": "assistant", "content": _MARK}
_QUESTION: Message = {"role": "user", "content": "?"}
_MARKED_CALL = {"name": _MARK, "arguments": dict[str, object]()}


class Span(NamedTuple):
    """Characters of a render, from the first that is meant to the first that is not."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Suffix:
    """The text that follows a sampled turn."""

    text: str
    """From the end of the turn, the token that ends it included, to the opening of the next."""
    extends: bool
    """Whether the full render is what was sent, what was sampled, and this: nothing before is rendered anew."""
    message: Message
    """The turn in the form in which it was rendered, to go on with."""
    whole: str | None
    """The full render, to the opening of the next turn; None where the template refuses every form of the turn."""


class Chat:
    """The conversations of a model and its tools, as the tokenizer's chat template shows them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.tools = tools
        self._template_kwargs = template_kwargs

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation. Raises ConfigError if the template refuses the messages."""
        return self._tokenizer.render_chat(
            messages,
            tools=self.tools,
            template_kwargs=self._template_kwargs,
            num_images=num_pictures(messages),
            add_generation_prompt=add_generation_prompt,
        )

    def suffix(
        self, before: Sequence[Message], shown: str, forms: Sequence[Message], after: Sequence[Message]
    ) -> Suffix:
        """Return what follows a sampled turn, as one text whatever the number of messages.

        Args:
            before: The conversation that was rendered for the turn.
            shown: Its render, and behind it what was sampled, without the token that ended it.
            forms: The turn as a message, in each form that may be rendered as it was said: first the nearest to it.
            after: What the model is told next.

        Raises:
            ConfigError: If the template refuses every form, or what it shows of ``after`` cannot be told apart.
        """
        refusal: ConfigError | None = None
        rewritten: str | None = None
        for form in forms:
            try:
                whole = self.render([*before, form, *after], add_generation_prompt=True)
            except ConfigError as error:
                refusal = error
                continue
            if whole.startswith(shown):
                return Suffix(whole[len(shown) :], extends=True, message=form, whole=whole)
            rewritten = whole
        for form in (_MARKED, *forms):
            text = self._behind(before, form, after)
            if text is not None:
                return Suffix(text, extends=False, message=forms[-1], whole=rewritten)
        raise refusal or ConfigError("the chat template shows nothing of what follows an assistant's turn")

    def turn(self, text: str, messages: Sequence[Message], index: int) -> Span:
        """Return where in ``text``, the render of a conversation, an assistant's turn is, given its message's place.

        A turn is what a model would sample: neither the opening that the generation prompt has nor what ends it. It is
        empty where the template shows nothing of it.

        Raises:
            ConfigError: If the template refuses the messages, or the turn cannot be told from what is around it; the
                message says which.
        """
        header, opening = self._opening(messages[:index])
        start, behind = self._around(messages, index, header)
        if not text.endswith(behind):
            raise ConfigError(
                f"message {index}: what the chat template shows behind an assistant's turn depends on what that says: "
                "its end cannot be told"
            )
        end = len(text) - len(behind)
        if start < 0 or not text.startswith(header, start):
            raise ConfigError(f"message {index}: the chat template opens an assistant's turn in several ways")
        start += len(header)
        if text.startswith(opening, start):
            start += len(opening)
        return Span(min(start, end), end)

    def _behind(self, before: Sequence[Message], form: Message, after: Sequence[Message]) -> str | None:
        """Return what the template shows behind a turn of this form, whatever the turn says."""
        try:
            ended = self.render([*before, form], add_generation_prompt=False)
            whole = self.render([*before, form, *after], add_generation_prompt=True)
            _, found, ending = self.render([*before, _MARKED], add_generation_prompt=False).rpartition(_MARK)
        except ConfigError:
            return None
        if form["content"] == _MARK and _MARK in whole:
            return whole.rpartition(_MARK)[2]
        if not found or not ended.endswith(ending):
            return None
        said = ended.removesuffix(ending)
        return whole[len(said) :] if whole.startswith(said) else None

    def _around(self, messages: Sequence[Message], index: int, header: str) -> tuple[int, str]:
        """Return where a turn begins in a render, and what is shown behind it."""
        before, after = messages[:index], messages[index + 1 :]
        shown = self.render(before, add_generation_prompt=False)
        ending = self.render([*before, _MARKED], add_generation_prompt=False).partition(_MARK)[2]
        for form in _marked_forms(messages[index]):
            try:
                whole = self.render([*before, form, *after], add_generation_prompt=False)
                alone = self.render([*before, form], add_generation_prompt=False)
            except ConfigError:
                continue
            if whole.count(_MARK) == alone.count(_MARK) == 1:
                front, _, rear = whole.partition(_MARK)
                lead, _, tail = alone[_num_common(shown, alone) :].partition(_MARK)
                start = front.rfind(header) if header else len(front.removesuffix(lead))
                return start, rear.removeprefix(tail.removesuffix(ending))
        raise ConfigError(f"message {index}: the chat template shows nothing, or not just once, of what it says")

    def _opening(self, before: Sequence[Message]) -> tuple[str, str]:
        """Return how an assistant's turn begins in every render, and what a generation prompt has behind that."""
        asked = self.render(before, add_generation_prompt=True)
        shown = self.render(before, add_generation_prompt=False)
        try:  # a last turn may show more than an earlier one
            answered = self.render([*before, _MARKED, _QUESTION], add_generation_prompt=False).partition(_MARK)[0]
        except ConfigError:
            answered = self.render([*before, _MARKED], add_generation_prompt=False).partition(_MARK)[0]
        prompt = asked[_num_common(shown, asked) :]
        turn = answered[_num_common(shown, answered) :]
        length = next(length for length in range(len(prompt), -1, -1) if prompt[:length] in turn)
        return prompt[:length], prompt[length:]


def _marked_forms(message: Message) -> Iterator[Message]:
    yield _MARKED
    # Some templates want a call before the result of one, and some show nothing beside it.
    yield {**message, "content": _MARK}
    yield {**message, "content": "", "tool_calls": [{"type": "function", "function": _MARKED_CALL}]}


def _num_common(first: str, second: str) -> int:
    """Return how many characters two texts have in common from their beginnings."""
    least, most = 0, min(len(first), len(second))
    while least < most:
        middle = (least + most + 1) // 2
        if first[least:middle] == second[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
