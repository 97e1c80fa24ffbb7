"""What is learned of a template holds for all conversations of the same tools, and nothing that differs goes unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.conversations.zoo.families import FAMILIES, load

from rollfeed.conversations import Dialogue, TextPieces, TurnPlace
from rollfeed.prompts import LocalTokenizer
from rollfeed.types import Message

QUESTION: Message = {"role": "user", "content": "What is the result?"}


class CountingTokenizer:
    """A tokenizer that counts the messages that its template is given, and the characters that it is."""

    def __init__(self, inner: LocalTokenizer) -> None:
        self._inner = inner
        self.num_messages = self.num_characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **named: Any) -> str:
        self.num_messages += len(messages)
        return self._inner.render_chat(messages, **named)

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        self.num_characters += len(text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens)


def talk(dialogue: Dialogue, said: Sequence[str], *, after: Message) -> tuple[TurnPlace, list[bool]]:
    """Return where a conversation gets to, and which of its turns were rendered anew."""
    place, forks = dialogue.begin([QUESTION]), []
    for text in said:
        ids = dialogue.encode(text)
        told, place = dialogue.go_on(place, ids, [after])
        forks.append(told.is_context)
    return place, forks


def test_the_second_conversation_renders_less_than_the_first_and_none_of_it_whole() -> None:
    counting = CountingTokenizer(load("qwen3"))
    dialogue = Dialogue(counting)  # type: ignore[arg-type]
    costs = []
    for _ in range(3):
        before = counting.num_messages
        talk(dialogue, ["yes"] * 8, after=QUESTION)
        costs.append(counting.num_messages - before)
    assert costs[1] == costs[2] == 1 + 3 * 8
    assert costs[0] > costs[1]


def test_a_thought_that_a_later_question_makes_a_template_leave_out_is_seen_behind_results_of_tools() -> None:
    dialogue = Dialogue(load("qwen3"))
    for _ in range(2):
        talk(dialogue, ["yes"] * 6, after={"role": "tool", "content": "a"})
        talk(dialogue, ["yes"] * 6, after=QUESTION)
        place = dialogue.begin([QUESTION])
        for text in ["<think>\nWell.\n</think>\n\nyes", *["yes"] * 5]:
            told, place = dialogue.go_on(place, dialogue.encode(text), [{"role": "tool", "content": "a"}])
            assert not told.is_context
        told, place = dialogue.go_on(place, dialogue.encode("no"), [QUESTION])
        assert told.is_context


@pytest.mark.parametrize("name", ["qwen3", "numbered"])
def test_what_was_sent_is_compared_with_the_whole_and_a_difference_is_not_made_twice(name: str) -> None:
    dialogue = Dialogue(load(name))
    place, _ = talk(dialogue, ["yes"] * 9, after=QUESTION)
    assert dialogue.check(place)
    # As a template that shows something otherwise nine turns later would have it.
    other = TurnPlace(None, place.messages, "x" + place.text, place.kinds, place.num_turns, is_compared=False)
    assert not dialogue.check(other)
    counting = CountingTokenizer(load(name))
    dialogue._chat._tokenizer = counting  # type: ignore[assignment]
    talk(dialogue, ["yes"], after=QUESTION)
    assert counting.num_messages > 1


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_pieces_are_tokenised_as_the_whole_and_long_ones_once(name: str) -> None:
    counting = CountingTokenizer(load(name))
    pieces = TextPieces(counting)  # type: ignore[arg-type]
    end = FAMILIES[name].ends[0]
    text = f"{'the result of the call ' * 200}{end}\nand the answer{end}\n"
    for _ in range(12):
        assert np.array_equal(pieces.encode(text), load(name).encode(text, add_special_tokens=False))
    before = counting.num_characters
    pieces.encode(text)
    assert counting.num_characters - before in (len(text), len(text) - len(text.partition(end)[0]))


def test_a_long_text_is_tokenised_once_where_no_other_conversation_has_it() -> None:
    counting = CountingTokenizer(load("qwen3"))
    dialogue = Dialogue(counting)  # type: ignore[arg-type]
    text = dialogue.begin([{"role": "user", "content": "the result of the call " * 200}]).text
    dialogue.encode(text)
    assert counting.num_characters == len(text)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokens_and_texts_are_those_of_the_model_s_own_tokenizer(name: str) -> None:
    tokenizer = load(name)
    theirs = tokenizer._tokenizer
    for text in (f" the caf\u00e9 {FAMILIES[name].ends[0]}\n  and\t\U0001f600", "", "a"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            told = theirs.decode(ids.tolist(), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == told
