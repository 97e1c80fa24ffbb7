"""The graders of short texts: f1, bbeh, random, and any of them on the content of a box."""

from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.registry import BUILTIN_GRADERS, boxed
from rollfeed.types import Correct, Outcome


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Lima Lima Lima Lima Lima", "Lima", 1 / 3),
        ("A", "A", 1),
        ("B", "A", 0),
        ("the", "the", 1),
        ("the quick Fox.", "Quick fox", 1),
        ("Ada Lovelace", "Ada King Lovelace", 0.8),
        ("Ada Lovelace", ["Grace Hopper", "Ada King Lovelace"], 0.8),
        ("New-Haven", "new haven", 1),
        ("\u00abZ\u00fcrich\u00bb", "z\u00fcrich", 1),
        ("yes", "no", 0),
        ("Yes.", "yes", 1),
        ("yes it is", "yes", 0),
        ("no", "no one knows", 0),
        ("noanswer", "noanswer", 1),
        ("", "Berlin", 0),
        ("...", "Berlin", 0),
        ("1,000", "1000", 1),
        ("3.5", "35", 0),
        ("-5", "5", 0),
        ("1999", 1999, 1),
        ("<think>Rome or Paris</think>Paris", "Paris", 1),
        ("<think>Paris", "Paris", 0),
    ],
)
def test_f1_is_that_of_the_words(response: str, label: Any, expected: float) -> None:
    verdict = BUILTIN_GRADERS["f1"](response, label, {})
    assert verdict.reward == pytest.approx(expected)
    assert verdict.correct is (Correct.YES if expected == 1 else Correct.NO)


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Reasoning...\nThe answer is: (B)", "b", 1),
        ("The answer is: B", "(b)", 1),
        ("The answer is: **(B)**.", "(B)", 1),
        ("The final answer is: 5.0.", "5", 1),
        ("The answer is 1,234", "1234", 1),
        ("The answer is: 6", "5", 0),
        ("The answer is: [3, 1, 2]", "3, 1, 2", 1),
        ("The answer is: 3,1,2", "[3, 1, 2]", 1),
        ("The answer is: [3, 2, 1]", "3, 1, 2", 0),
        (r"The answer is: \boxed{proved}", "proved", 1),
        (r"The answer is: $\text{Proved}$", "proved", 1),
        ("The answer is: 'yes'", "yes", 1),
        ("The answer is: yes?", "yes", 1),
        ("The answer is: yes. But The answer is: no", "no", 1),
        ("The answer is: yes. But The answer is: no", "yes", 0),
        ("The answer is:\n(B)\nI am sure.", "(B)", 1),
        ("THE ANSWER IS: unknown", "unknown", 1),
        ("proved", "proved", 1),
        ("I think it may be proved or disproved", "proved", 0),
        ("The answer is: disproved", "proved", 0),
        ("<think>The answer is: no</think>The answer is: yes", "yes", 1),
        ("", "yes", 0),
    ],
)
def test_bbeh_matches_leniently(response: str, label: Any, expected: int) -> None:
    assert BUILTIN_GRADERS["bbeh"](response, label, {}).reward == expected


@pytest.mark.parametrize(
    ("response", "rewards"),
    [
        ("<answer>The answer is: (A)</answer>", (1.0, 1.0, 1.0)),
        (r"\boxed{7} <answer>a</answer>", (1.0, 1.0, 1.0)),
        ("<answer>b</answer>", (0.1, 0.0, 1.0)),
        (r"so \boxed{b}", (0.1, 0.0, 1.0)),
        ("The answer is: A", (1.0, 1.0, 0.0)),
        ("The answer is: B", (0.0, 0.0, 0.0)),
        ("<answer></answer>", (0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0)),
    ],
)
def test_with_a_key_bbeh_rewards_marks_as_rlve_does(response: str, rewards: tuple[float, ...]) -> None:
    verdict = BUILTIN_GRADERS["bbeh"](response, "(A)", {"reward_key": "reward"})
    assert verdict.reward == dict(zip(("reward", "accuracy", "format_score"), rewards, strict=True))
    assert BUILTIN_GRADERS["bbeh"](response, "(A)", {}).reward == rewards[1]


@pytest.mark.parametrize("rm_type", ["f1", "bbeh"])
@pytest.mark.parametrize("label", [None, {}, [], True])
def test_label_of_a_wrong_kind_is_an_error(rm_type: str, label: Any) -> None:
    assert BUILTIN_GRADERS[rm_type]("text", label, {}).outcome is Outcome.ERROR


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "metadata", "expected"),
    [
        ("f1", r"Many cities. \boxed{New Haven}", "New Haven", {}, 1),
        ("f1", r"\boxed{Paris} or \boxed{New Haven}", "New Haven", {}, 1),
        ("f1", "New Haven, without a box", "New Haven", {}, 0),
        ("f1", r"<think>\boxed{New Haven}</think> no", "New Haven", {}, 0),
        ("gpqa", r"A and D look close. \boxed{B}", "B", {"valid_letters": ["A", "B", "C", "D"]}, 1),
        ("gpqa", r"Answer: C is tempting. \boxed{\text{A}}", "A", {}, 1),
        ("gpqa", "Answer: A", "A", {}, 0),
        ("bbeh", r"so \boxed{(B)}", "b", {}, 1),
        ("exact", r"so \boxed{Paris}", "Paris", {}, 1),
        ("number", r"7 \boxed{42}", "42", {}, 1),
        ("math", r"so \boxed{\frac12}", "0.5", {}, 1),
        ("deepscaler", r"<think>a</think> \boxed{\frac12}", "0.5", {}, 1),
        ("math_verify", r"Answer: 0.5", "0.5", {}, 0),
    ],
)
def test_boxed_types_grade_the_content_of_the_last_box(
    rm_type: str, response: str, label: str, metadata: dict[str, Any], expected: int
) -> None:
    assert boxed(BUILTIN_GRADERS[rm_type])(response, label, metadata).reward == expected


def test_random_is_a_coin_that_the_seed_decides() -> None:
    grade = BUILTIN_GRADERS["random"]
    rewards = [grade("text", None, {"sample_seed": seed}).reward for seed in range(1_000)]
    assert rewards == [grade("other", "label", {"sample_seed": seed}).reward for seed in range(1_000)]
    assert set(rewards) == {0.0, 1.0}
    assert 400 < sum(reward for reward in rewards if isinstance(reward, float)) < 600


def test_random_without_a_seed_goes_by_the_response() -> None:
    grade = BUILTIN_GRADERS["random"]
    assert grade("\ud83d", None, {}).reward == grade("\ud83d", 5, {}).reward
    assert {grade(str(number), None, {}).reward for number in range(100)} == {0.0, 1.0}
