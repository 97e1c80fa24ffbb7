"""Rows with a preferred answer and another one: what is stored, and the tokens of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollfeed.conversations.pairs import PAIR, paired_answers, preference_prompt
from rollfeed.errors import DataError
from rollfeed.testing import CharTokenizer, make_prompt
from rollfeed.types import Prompt

USER = {"role": "user", "content": "q"}
KEYS: Any = {"chosen_key": "good", "rejected_key": "bad"}


class ChatTokenizer(CharTokenizer):
    """A character is a token; turns end with that of the end."""

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True, **_: Any) -> str:
        turns = "".join(f"<{each['role'][0]}>{each['content']}\3" for each in messages)
        return turns + ("<a>" if add_generation_prompt else "")


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def chat(good: Any, bad: Any) -> Prompt:
    return make_prompt("?", messages=(USER,), metadata={"good": good, "bad": bad, "topic": "t"})


def texts(prompt: Prompt, tokenizer: CharTokenizer) -> list[tuple[str, str]]:
    """Prompt and answer of both."""
    found = []
    for answered in paired_answers(prompt, tokenizer=tokenizer):
        before = len(answered.prompt.token_ids)
        np.testing.assert_array_equal(answered.loss_mask, np.arange(len(answered.token_ids)) >= before)
        whole = "".join(map(chr, answered.token_ids))
        found.append((whole[:before], whole[before:]))
    return found


def test_texts_are_answers_behind_the_prompt_with_their_end_and_the_longer_one_is_returned() -> None:
    prompt = make_prompt("q=", metadata={"good": "ab", "bad": "abcd", "topic": "t"})
    longer = preference_prompt(prompt, tokenizer=CharTokenizer(), **KEYS)
    assert "".join(map(chr, longer.token_ids)) == "q=abcd\3"
    assert longer.prompt.metadata == {"topic": "t", PAIR: {"chosen": "ab", "rejected": "abcd", "margin": 0.0}}
    assert texts(longer.prompt, CharTokenizer()) == [("q=", "ab\3"), ("q=", "abcd\3")]


@pytest.mark.parametrize("form", [lambda text: text, lambda text: [said(text)], lambda text: [USER, said(text)]])
def test_answers_of_a_conversation_are_texts_or_messages_with_the_prompts_or_without(form: Any) -> None:
    longer = preference_prompt(chat(form("xa"), form("xbc")), tokenizer=ChatTokenizer(), **KEYS)
    pair = longer.prompt.metadata[PAIR]
    assert (pair["chosen"], pair["rejected"]) == ([said("xa")], [said("xbc")])
    # What both begin with is the prompt's, so that each has a token of its own first.
    assert texts(longer.prompt, ChatTokenizer()) == [("<u>q\3<a>x", "a\3"), ("<u>q\3<a>x", "bc\3")]


def test_an_answer_that_the_other_one_begins_with_has_its_end_of_its_own() -> None:
    longer = preference_prompt(chat("ab", "a"), tokenizer=ChatTokenizer(), **KEYS)
    assert texts(longer.prompt, ChatTokenizer()) == [("<u>q\3<a>a", "b\3"), ("<u>q\3<a>a", "\3")]


def test_a_margin_is_kept_and_a_row_without_one_has_none() -> None:
    for metadata, margin in (({"ahead": 2}, 2.0), ({}, 0.0)):
        prompt = make_prompt("q", metadata={"good": "a", "bad": "b", **metadata})
        kept = preference_prompt(prompt, tokenizer=CharTokenizer(), margin_key="ahead", **KEYS).prompt.metadata
        assert kept == {PAIR: {"chosen": "a", "rejected": "b", "margin": margin}}


@pytest.mark.parametrize(
    "bad", [[USER], [said("a"), USER], [{"content": "a"}], [], "", 3, None, [{"role": "user", "content": "other"}]]
)
def test_what_is_no_answer_of_the_assistant_is_refused(bad: Any) -> None:
    with pytest.raises(DataError, match="column 'bad'"):
        preference_prompt(chat("a", bad), tokenizer=ChatTokenizer(), **KEYS)


def test_equal_answers_teach_nothing_whatever_their_form() -> None:
    with pytest.raises(DataError, match="the same answer"):
        preference_prompt(chat("a", [USER, said("a")]), tokenizer=ChatTokenizer(), **KEYS)
