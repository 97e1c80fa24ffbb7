from __future__ import annotations

from typing import Any

import pytest

from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.registry import BUILTIN_GRADERS, boxed
from rollfeed.types import Correct, Outcome


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


@pytest.mark.parametrize("rm_type", ["dapo", "boxed_dapo"])
@pytest.mark.parametrize(
    ("answer", "score", "acc", "pred"), [("4", 1.0, 1.0, "4"), ("5", -1.0, 0.0, "5"), (None, -1.0, 0.0, None)]
)
@pytest.mark.parametrize("place", ["metadata", "hub", "call"])
async def test_a_reward_key_chooses_score_or_acc(
    rm_type: str, answer: str | None, score: float, acc: float, pred: str | None, place: str
) -> None:
    response = "" if answer is None else rf"Answer: \boxed{{{answer}}}"
    scorer = RewardHub(
        graders=BUILTIN_GRADERS, rm_type=rm_type, reward_key="acc" if place == "hub" else None, timeout_seconds=5.0
    )
    metadata, key = {"reward_key": "acc"} if place == "metadata" else None, "acc" if place == "call" else None
    verdict = await scorer.grade(response, "4", metadata=metadata, reward_key=key)
    assert verdict.reward == (acc if place == "metadata" else {"score": score, "acc": acc})
    assert verdict.extracted == pred
    scored = await scorer.grade(response, "4", metadata={"reward_key": "score"})
    assert (scored.reward, scored.correct) == (score, verdict.correct)


async def test_a_key_that_dapo_does_not_have_is_an_error_that_lists_its_keys() -> None:
    scorer = RewardHub(graders=BUILTIN_GRADERS, rm_type="dapo", reward_key="scores", timeout_seconds=5.0)
    for response in ("Answer: 4", "none", "Answer: 5"):
        verdict = await scorer.grade(response, "4")
        assert verdict.outcome is Outcome.ERROR
        assert verdict.detail == "reward_key = 'scores' is not in the reward, which has ['acc', 'score']"


async def test_without_a_key_the_reward_is_one_number_as_ever() -> None:
    scorer = RewardHub(graders=BUILTIN_GRADERS, rm_type="dapo", timeout_seconds=5.0)
    assert (await scorer.grade("Answer: 4", "4")).reward == 1.0
