"""The environments whose answer is a number."""

from __future__ import annotations

import pytest

from rollfeed.environments.builtin import AddNumbers, CompareMax, CountSymbol
from rollfeed.types import Correct, Verdict


def add(response: str, *terms: int) -> Verdict:
    return AddNumbers().verify({"terms": list(terms)}, response)


@pytest.mark.parametrize(
    "response",
    [
        "42",
        "17 + 25 = 42",
        "The sum of 17 and 25 is 42.",
        "17 and 25 together make 42",
        "The answer is 42. We add 17 and 25, which takes 2 steps.",
        "We first add 7 and 5.\n17 + 25 equals **42**.",
        "42.0",
        "Answer:\n42",
    ],
)
def test_sum_is_found_in_the_way_chat_models_answer(response: str) -> None:
    assert add(response, 17, 25).correct is Correct.YES


@pytest.mark.parametrize(
    "response", ["40, 41, 42, 43", "\\boxed{41, 42}", "Answer: 41 or 42", "17, 25", "17 + 25", "-42"]
)
def test_list_of_candidates_is_not_a_sum(response: str) -> None:
    assert add(response, 17, 25).correct is Correct.NO


def test_wrong_sum_earns_more_the_more_last_digits_are_right() -> None:
    nothing, number, one_digit, two_digits, right = (
        add(response, 1203, 1031).reward for response in ("none", "2999", "2994", "2934", "2234")
    )
    assert nothing == 0.0 < number < one_digit < two_digits < right == 1.0  # type: ignore[operator]


def compare(response: str, *numbers: int) -> Verdict:
    return CompareMax().verify({"numbers": list(numbers)}, response)


@pytest.mark.parametrize(
    "response",
    [
        "42",
        "The largest number is 42.",
        "Of 17, 42 and 5 the largest is 42.",
        "42 is larger than 17.",
        "42 is the largest number, 17 and 5 are smaller.",
        "17, 42, 5: the maximum is **42**",
        "The answer is 42 because it comes after 17.",
        "The largest number is 42, which is 25 more than 17.",
        "17 is smaller.\n42",
    ],
)
def test_maximum_is_found_in_the_way_chat_models_answer(response: str) -> None:
    assert compare(response, 17, 42, 5).correct is Correct.YES


@pytest.mark.parametrize(
    "response",
    [
        "5, 17, 42",
        "The numbers are 5, 17 and 42.",
        "\\boxed{5, 17, 42}",
        "<answer>17 or 42</answer>",
        "Answer: 17, 42",
        "5 is largest, 17 is largest, 42 is largest",
        "17 is larger than 42.",
        "The largest is 42, 17 or 5.",
        "The largest number is 42 or 17",
    ],
)
def test_list_of_candidates_is_not_a_maximum(response: str) -> None:
    assert compare(response, 17, 42, 5).correct is Correct.NO


def test_wrong_number_earns_more_the_larger_it_is() -> None:
    stranger, smallest, middle, right = (compare(response, 17, 42, 5).reward for response in ("99", "5", "17", "42"))
    assert stranger == 0.0 < smallest < middle < right == 1.0  # type: ignore[operator]


def count(response: str) -> Verdict:
    return CountSymbol().verify({"letters": "bcbcb", "symbol": "b"}, response)


@pytest.mark.parametrize(
    "response",
    [
        "3",
        "The letter b appears 3 times in the list b c b c b.",
        "It appears three times.",
        'The letter "b" appears 3 times.',
        "Three",
    ],
)
def test_count_is_found_in_digits_and_words(response: str) -> None:
    assert count(response).correct is Correct.YES


@pytest.mark.parametrize("response", ["1, 2, 3", "two or three", "one two three", "b b b", "twice", "2 or 3"])
def test_list_of_candidates_is_not_a_count(response: str) -> None:
    assert count(response).correct is Correct.NO


def test_count_earns_more_the_nearer_it_is() -> None:
    far, near, right = (count(response).reward for response in ("9", "2", "3"))
    assert 0.0 < far < near < right == 1.0  # type: ignore[operator]
