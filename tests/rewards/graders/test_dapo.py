from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards import BUILTIN_GRADERS
from rollfeed.rewards.registry import boxed
from rollfeed.types import Correct


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("We add.\nAnswer: $13$", "13", 1),
        ("We add.\nAnswer: $14$", "13", -1),
        ("answer:13", "13", 1),
        ("Answer:\n13", "13", 1),
        ("**Answer:** 13", "13", 1),
        ("Answer: **13**", "13", 1),
        ("Answer: 13.", "13", 1),
        ("Answer: 5\nAnswer: 9", "9", 1),
        ("Answer: 5\nAnswer: 9", "5", -1),
        ("Answer: 31\n" + "more " * 70, "31", -1),
        ("junk " * 10_000 + "\nAnswer: 17", "17", 1),
        (r"Answer: \boxed{77}", "77", 1),
        (r"Answer: \boxed{}", "77", -1),
        ("Answer: 1,024", "1024", 1),
        ("Answer: 1,2", "12", -1),
        ("Answer: x = 42", "42", 1),
        ("Answer: 13", "13.0", 1),
        ("Answer: 13", 13.0, 1),
        ("Answer: 9007199254740993", "9007199254740993", 1),
        ("Answer: 9007199254740992", "9007199254740993", -1),
        ("Answer: 9007199254740993", "9007199254740993.0", 1),
        (r"Answer: \frac{1}{2}", r"\frac{1}{2}", 1),
        ("Answer: 0.5", "1/2", 1),
        ("Answer: \u22125", "-5", 1),
        (r"Answer: \$18.50", "18.5", 1),
        ("Answer: (C)", "C", 1),
        ("The result is 13", "13", -1),
        ("Answer:", "13", -1),
        ("", "5", -1),
    ],
)
def test_last_answer_line_of_the_end_counts(response: str, label: Any, expected: int) -> None:
    verdict = BUILTIN_GRADERS["dapo"](response, label, {})
    assert verdict.reward == expected
    assert verdict.correct is (Correct.YES if expected == 1 else Correct.NO)


def test_verdict_carries_the_prediction() -> None:
    assert BUILTIN_GRADERS["dapo"]("Answer: $14$", "13", {}).extracted == "14"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{77}", 1),
        (r"so \boxed{78}", -1),
        ("Answer: 77", -1),
        (r"\boxed{77}" + " and more" * 20, -1),
        (r"\boxed{77", -1),
    ],
)
def test_strict_variant_wants_a_box_at_the_end(response: str, expected: int) -> None:
    assert BUILTIN_GRADERS["dapo"](response, "77", {"strict_box": True}).reward == expected
    assert boxed(BUILTIN_GRADERS["dapo"])(response, "77", {}).reward == expected
