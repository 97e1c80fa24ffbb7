from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Correct, Outcome


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("42", 42),
        ("The answer is 42.", "42"),
        ("3 * 14 = 42\nSo she has 42 apples.", "42"),
        ("\\boxed{1,234}", 1234),
        ("It costs $18.50", "18.5"),
        ("-7", "−7"),  # noqa: RUF001
        ("\\boxed{\\frac{1}{2}}", 0.5),
        ("one half is 0.5", "1/2"),
        ("0.1", 0.1),
        ("0", 0),
        ("10000000000000000000000001", "10000000000000000000000001"),
        ("#### 72", "48 / 2 = 24, 48 + 24 = 72\n#### 72"),
        ("5", [3, 5]),
    ],
)
def test_equal_number_is_right(response: str, label: Any) -> None:
    verdict = BUILTIN_GRADERS["number"](response, label, {})
    assert (verdict.reward, verdict.correct, verdict.outcome) == (1.0, Correct.YES, Outcome.OK), verdict.detail


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("41", 42),
        ("42, or rather 43", 42),
        ("\\boxed{43} is near 42", 42),
        ("−5", 5),  # noqa: RUF001
        ("10000000000000000000000001", "10000000000000000000000002"),
        ("0.30000000000000004", "0.3"),
        ("10²", "102"),
        ("1 1/2", "1/2"),
    ],
)
def test_other_number_is_wrong(response: str, label: Any) -> None:
    verdict = BUILTIN_GRADERS["number"](response, label, {})
    assert (verdict.reward, verdict.correct, verdict.format_ok) == (0.0, Correct.NO, bool(verdict.extracted))


@pytest.mark.parametrize("response", ["", "no idea", "<think>42", "\\boxed{x}", "1e9999"])
def test_response_without_a_number_is_wrong_in_form(response: str) -> None:
    verdict = BUILTIN_GRADERS["number"](response, 42, {})
    assert (verdict.reward, verdict.format_ok, verdict.extracted) == (0.0, False, None)


@pytest.mark.parametrize("label", [None, True, "", "many", "3 or 4", [], [1, "x"], {"a": 1}, float("nan")])
def test_label_that_is_not_one_number_is_an_error(label: Any) -> None:
    verdict = BUILTIN_GRADERS["number"]("42", label, {})
    assert verdict.outcome is Outcome.ERROR
    assert "rm_type number: the label is" in verdict.detail


@given(st.text() | st.text(alphabet="0123456789.,-/e{}\\ "))
def test_any_response_is_graded(response: str) -> None:
    assert BUILTIN_GRADERS["number"](response, "42", {}).outcome is Outcome.OK


@given(st.fractions())
def test_every_fraction_equals_itself(number: Any) -> None:
    assert BUILTIN_GRADERS["number"](f"so {number}", str(number), {}).correct is Correct.YES
