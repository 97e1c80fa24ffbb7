from __future__ import annotations

from typing import Any

import pytest

from rollfeed.environments.builtin import ConstrainedWords
from rollfeed.types import Correct, Verdict


def check(response: str, **changes: Any) -> Verdict:
    rules = {"include": ["river", "dog"], "exclude": ["the"], "min_words": 3, "max_words": 8, "last": None}
    return ConstrainedWords().verify({**rules, **changes}, response)


@pytest.mark.parametrize(
    "response",
    [
        "A dog swims in a river.",
        "A DOG swims in a River!",
        'Here is a sentence for you, written with much care: "A dog swims in a river."',
        "Sure!\n\nA dog swims in a river.",
        "Answer: My dog doesn't like this river.",
    ],
)
def test_sentence_that_keeps_every_rule_is_right(response: str) -> None:
    verdict = check(response)
    assert verdict.correct is Correct.YES, verdict.detail


@pytest.mark.parametrize(
    ("response", "broken"),
    [
        ("A dog swims in a lake.", "with 'river'"),
        ("Two dogs swim in a river.", "with 'dog'"),
        ("The dog swims in a river.", "without 'the'"),
        ("A dog swims in a river with nine other dogs.", "3 to 8 words"),
        ("dog river", "3 to 8 words"),
        ("dog river dog river", "3 to 8 words"),
    ],
)
def test_broken_rule_is_named(response: str, broken: str) -> None:
    verdict = check(response)
    assert verdict.correct is Correct.NO
    assert verdict.detail == f"broken: {broken}"
    assert 0.0 < verdict.reward < 1.0  # type: ignore[operator]


def test_last_word_can_be_a_rule() -> None:
    assert check("My dog likes a river.", last="river").correct is Correct.YES
    assert check("A river is for my dog.", last="river").detail == "broken: 'river' last"


def test_words_to_avoid_pay_nothing_without_a_word_to_use() -> None:
    assert check("zzz").reward == 0.0


def test_reward_grows_with_the_rules_kept() -> None:
    rewards = [check(r).reward for r in ("zzz", "Cats like milk.", "Cats like a dog.", "Cats like a dog, a river.")]
    assert rewards == sorted(set(rewards))  # type: ignore[type-var]
    assert rewards[-1] == 1.0
