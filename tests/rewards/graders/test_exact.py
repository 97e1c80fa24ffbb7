from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Correct, Outcome


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("Paris", "Paris"),
        ("  paris.\n", "Paris"),
        ("It is a city in France.\nAnswer: **Paris**", "paris"),
        ("\\boxed{Paris}", "Paris"),
        ("Rome? No.\n\nNew   York", "new york"),
        ("<think>Rome</think>Paris", "Paris"),
        ("ＰＡＲＩＳ", "Paris"),  # noqa: RUF001
        ("STRASSE", "Straße"),
        ("42", 42),
        ("0", 0),
        ("Lyon", ["Paris", "Lyon"]),
    ],
)
def test_equal_text_is_right(response: str, label: Any) -> None:
    verdict = BUILTIN_GRADERS["exact"](response, label, {})
    assert (verdict.reward, verdict.correct, verdict.format_ok) == (1.0, Correct.YES, True)


@pytest.mark.parametrize(
    ("response", "label"),
    [("Rome", "Paris"), ("Paris and Rome", "Paris"), ("Answer: Paris\nAnswer: Rome", "Paris"), ("42", 42.5)],
)
def test_other_text_is_wrong(response: str, label: Any) -> None:
    verdict = BUILTIN_GRADERS["exact"](response, label, {})
    assert (verdict.reward, verdict.correct, verdict.format_ok) == (0.0, Correct.NO, True)


@pytest.mark.parametrize("response", ["", "<think>Paris", "\\boxed{Paris", "Answer:"])
def test_response_without_an_answer_is_wrong_in_form(response: str) -> None:
    verdict = BUILTIN_GRADERS["exact"](response, "Paris", {})
    assert (verdict.reward, verdict.correct, verdict.format_ok) == (0.0, Correct.NO, False)


@pytest.mark.parametrize("label", [None, True, "", " ", [], ["a", None], {"a": 1}])
def test_label_that_cannot_be_compared_is_an_error(label: Any) -> None:
    verdict = BUILTIN_GRADERS["exact"]("Paris", label, {})
    assert verdict.outcome is Outcome.ERROR
    assert "rm_type exact: the label is" in verdict.detail
