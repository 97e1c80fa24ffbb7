from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollfeed.rewards.results import to_verdict
from rollfeed.types import Correct, Outcome, Verdict


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_numbers_and_bools_are_rewards(result: Any, reward: float) -> None:
    verdict = to_verdict(result, reward_key=None)
    assert (verdict.reward, type(verdict.reward)) == (reward, float)
    assert verdict.correct is Correct.UNDEFINED


def test_dictionary_with_the_key_is_a_reward() -> None:
    assert to_verdict({"a": 1, "b": True}, reward_key="a").reward == {"a": 1.0, "b": 1.0}


def test_texts_beside_named_numbers_are_no_rewards_and_pred_is_the_answer() -> None:
    verdict = to_verdict({"score": 1.0, "acc": True, "pred": "42", "why": None}, reward_key="score")
    assert (verdict.reward, verdict.extracted) == ({"score": 1.0, "acc": 1.0}, "42")
    assert to_verdict({"score": -1, "pred": None}, reward_key="score").extracted is None


def test_verdicts_are_taken_as_they_are() -> None:
    verdict = Verdict(reward=0.5, correct=Correct.NO, extracted="x")
    assert to_verdict(verdict, reward_key=None) is verdict
    failed = Verdict(reward=None, outcome=Outcome.TIMEOUT)
    assert to_verdict(failed, reward_key="a") is failed


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        (None, "it returned None, a NoneType; it must be a number"),
        ("1", "it returned '1', a str; it must be a number"),
        ([1.0], "it returned [1.0], a list; it must be a number"),
        (1j, "it returned 1j, a complex; it must be a number"),
        (float("nan"), "it returned nan; it must be finite"),
        (float("-inf"), "it returned -inf; it must be finite"),
        (10**400, "it must be finite"),
        ({}, "it returned {}; a reward dictionary maps names to numbers"),
        ({1: 2.0}, "it returned {1: 2.0}; a reward dictionary maps names to numbers"),
        ({"a": "1"}, "entry 'a' of the reward is '1', a str; it must be a number"),
        ({"b": 1.0, "pred": "4"}, "reward_key = 'a' is not in the reward, which has ['b']"),
        ({"pred": "4"}, "reward_key = 'a' is not in the reward, which has []"),
        ({"a": 1.0, "b": [1.0]}, "entry 'b' of the reward is [1.0], a list; it must be a number"),
        ({"a": None}, "entry 'a' of the reward is None, a NoneType; it must be a number"),
        ({"a": 1.0, "b": float("nan")}, "entry 'b' of the reward is nan; it must be finite"),
        ({"b": 1.0}, "reward_key = 'a' is not in the reward, which has ['b']"),
        (Verdict(reward={"b": 1.0}), "reward_key = 'a' is not in the reward, which has ['b']"),
    ],
)
def test_what_is_no_reward_is_an_error_that_says_so(result: Any, detail: str) -> None:
    verdict = to_verdict(result, reward_key="a")
    assert verdict.outcome is Outcome.ERROR
    assert detail in verdict.detail


def test_dictionary_without_a_reward_key_is_an_error_with_the_remedy() -> None:
    assert "set reward_key to one of them" in to_verdict({"a": 1.0}, reward_key=None).detail
