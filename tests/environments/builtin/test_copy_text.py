from __future__ import annotations

from random import Random

import pytest

from rollfeed.environments.builtin import CopyText
from rollfeed.types import Correct, Verdict


def copy(response: str, *, label: str = "") -> Verdict:
    return CopyText().verify({"text": "apple river stone", "label": label}, response)


@pytest.mark.parametrize(
    "response",
    [
        "apple river stone",
        '"apple river stone"',
        "apple  river\tstone.",
        "Sure! Here is the text:\n\napple river stone",
        'The text is "apple river stone".',
        '"apple river stone"\n\nThis is a common expression.',
        'Text: "apple river stone"\nRepeat this text.\napple river stone',
    ],
)
def test_copy_is_found_in_the_way_chat_models_answer(response: str) -> None:
    assert copy(response).correct is Correct.YES


@pytest.mark.parametrize(
    "response",
    [
        "apple stone river",
        "Apple River Stone",
        "apple river",
        "apple river stone apple river stone",
        'Text: "apple river stone"\nRepeat this text.',
        '"apple river" and "apple river stone" are texts.',
    ],
)
def test_copy_must_be_exact(response: str) -> None:
    assert copy(response).correct is Correct.NO


def test_near_copies_earn_more_the_more_words_are_in_place() -> None:
    none, one, two, case = (copy(r).reward for r in ("moon", "apple moon", "apple stone", "Apple river stone"))
    assert none == 0.0 < one < two < case < 1.0  # type: ignore[operator]


def test_repeating_every_line_is_not_copying_the_one_asked_for() -> None:
    environment = CopyText()
    for seed in range(50):
        question, params, answer = environment.make(14, Random(seed))
        lines = question.splitlines()[:-1]
        assert any(answer in line for line in lines)  # type: ignore[operator]
        for response in ("\n".join(lines), "\n".join(line[4:-1] for line in lines)):
            assert environment.verify(params, response).correct is Correct.NO


def test_label_of_the_line_may_be_repeated() -> None:
    assert copy("B: apple river stone", label="B").correct is Correct.YES
    assert copy('B: "apple river stone"', label="B").correct is Correct.YES


def test_a_text_that_is_quoted_only_to_be_talked_about_is_not_repeated() -> None:
    params = {"text": "cake", "label": ""}
    talk = 'The "cake" allegedly originates from a speculative fact about a fictional dessert.'
    assert CopyText().verify(params, talk).correct is Correct.NO
    assert CopyText().verify(params, 'Here is the text: "cake".').correct is Correct.YES
