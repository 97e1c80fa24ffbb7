"""The graders of boxed mathematics: math, deepscaler, math_verify."""

from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Correct, Outcome

THOUGHT = "<think>\nstep by step\n</think>\n"


def reward(rm_type: str, response: str, label: Any) -> Any:
    return BUILTIN_GRADERS[rm_type](response, label, {}).reward


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"\boxed{42}", 42, 1),
        (r"\boxed{0}", 0, 1),
        (r"\boxed{0.5}", 0.5, 1),
        (r"\boxed{\frac{1}{2}}", ["3", "0.5"], 1),
        (r"\boxed{21}", r"Thus it is \boxed{21}", 1),
        (r"\boxed{21}", "1 + 20 = 21\n#### 21", 1),
        (r"\boxed{ 21 }", "$21$", 1),
        (r"\fbox{21}", "21", 1),
        (r"\boxed {21}", "21", 1),
        (r"so \boxed{\{1, 2\}}", r"\{2,1\}", 1),
        (r"\boxed{4}, no: \boxed{6}", "6", 1),
        (r"\boxed{4}, no: \boxed{6}", "4", 0),
        (r"\boxed{6}, no: \boxed{6", "6", 0),
        (r"\boxed{\boxed{6}}", "6", 1),
        (r"<think>\boxed{6}</think> \boxed{7}", "6", 0),
        (r"<think>\boxed{6}", "6", 0),
        ("6", "6", 0),
        (r"\boxed", "6", 0),
        (r"\boxed{}", "", 0),
        (r"\boxed{ }", " ", 0),
        (r"\boxed{\text{}}", "", 0),
        (r"\boxed{None}", "7", 0),
        (r"\boxed{\sin^2 x + \cos^2 x}", "1", 1),
        ("\uff5bx\uff5d \\boxed\uff5b6\uff5d", "6", 1),
        (r"\boxed{6}" + " and so on" * 1_500, "6", 1),
    ],
)
def test_math_grades_the_last_box(response: str, label: Any, expected: int) -> None:
    assert reward("math", response, label) == expected


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "math_verify", "dapo"])
@pytest.mark.parametrize("label", [None, True, {"answer": 5}, [], [None], float("nan"), ["5", {}]])
def test_label_of_a_wrong_kind_is_an_error(rm_type: str, label: Any) -> None:
    verdict = BUILTIN_GRADERS[rm_type](rf"{THOUGHT}\boxed{{5}}", label, {})
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert "label" in verdict.detail


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (rf"{THOUGHT}\boxed{{5}}", "5", 1),
        (r"\boxed{5}", "5", 0),
        (r"scratch \boxed{4} ###Response \boxed{5}", "5", 1),
        (r"scratch \boxed{5} ###Response none", "5", 0),
        (r"###Response \boxed{4}</think> \boxed{5}", "5", 1),
        (r"<think>\boxed{5}</think> forgot", "5", 0),
        (r"<think>\boxed{5}", "5", 0),
        (r"<think>a</think>\boxed{3}<think>b</think>\boxed{5}", "5", 1),
        (r"<think>a</think>\boxed{3}<think>b</think>\boxed{5}", "3", 0),
        (rf"{THOUGHT}\boxed{{5}}", ["4", r"\boxed{5}"], 1),
        ("<think>\ud83d</think>\n\\boxed{8}", "8", 1),
        (rf"{THOUGHT}\boxed{{}}", "", 0),
    ],
)
def test_deepscaler_reads_what_follows_its_marker(response: str, label: Any, expected: int) -> None:
    assert reward("deepscaler", response, label) == expected


def test_deepscaler_says_when_a_response_has_no_marker() -> None:
    verdict = BUILTIN_GRADERS["deepscaler"](r"\boxed{5}", "5", {})
    assert (verdict.correct, verdict.format_ok) == (Correct.NO, False)
    assert "no </think>" in verdict.detail


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Final answer: 3 2/5", "17/5", 1),
        ("Final answer: 3 2/5", "3", 0),
        ("Checks out.\n\nFinal Answer: **58**", "58", 1),
        (r"The answer is $\frac{1}{2}$, since it is half.", "0.5", 1),
        (r"The answer is $x=3$ or $x=5$.", "3, 5", 1),
        ("The answer is 42 because of that.", "42", 1),
        ("so it equals $42$", "42", 1),
        ("first 7\nso the total is 42.", "42", 1),
        ("the numbers are 7 and 42 and so on", "42", 1),
        ("<answer>\\frac12</answer>", "1/2", 1),
        (r"\boxed{1728}", "1331, 1728", 0),
        ("no idea", "5", 0),
        ("", "5", 0),
    ],
)
def test_math_verify_reads_answers_without_a_box_too(response: str, label: str, expected: int) -> None:
    assert reward("math_verify", response, label) == expected


def test_wrong_answer_is_a_verdict_with_what_was_read() -> None:
    verdict = BUILTIN_GRADERS["math"](r"so $\boxed{ 41 }$.", "42", {})
    assert (verdict.reward, verdict.correct, verdict.extracted) == (0.0, Correct.NO, "41")


def test_response_without_an_answer_is_badly_formed() -> None:
    verdict = BUILTIN_GRADERS["math"]("41", "42", {})
    assert (verdict.reward, verdict.format_ok, verdict.extracted) == (0.0, False, None)
