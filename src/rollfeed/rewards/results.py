"""From what a reward function returned to a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from rollfeed.errors import RewardError
from rollfeed.types import Outcome, Verdict

REWARD_KEY = "reward_key"
"""Entry of the metadata that chooses among named rewards; where the prompt has none, the hub sets its own."""
_ANSWER = "pred"
"""Entry of named rewards with the answer that was graded, as a text."""


def to_verdict(result: Any, *, reward_key: str | None) -> Verdict:
    """Return ``result`` as a verdict: a number, a bool, named numbers or a verdict; anything else is an ERROR.

    Texts among named numbers are for people: ``pred`` becomes the answer that was graded, others are left out.
    """
    try:
        if isinstance(result, Mapping):
            return _named(result, reward_key)
        if not isinstance(result, Verdict):
            return Verdict(reward=_to_number(result, "it returned"))
        if isinstance(result.reward, dict):
            _check_key(result.reward, reward_key)
        return result
    except RewardError as error:
        return Verdict(reward=None, outcome=Outcome.ERROR, detail=str(error))


def pick(verdict: Verdict, reward_key: str) -> Verdict:
    """Return the verdict with the entry under ``reward_key`` as its reward, where that is a dictionary."""
    return replace(verdict, reward=verdict.reward[reward_key]) if isinstance(verdict.reward, dict) else verdict


def _named(result: Mapping[Any, Any], reward_key: str | None) -> Verdict:
    if not result or not all(isinstance(name, str) for name in result):
        raise RewardError(f"it returned {result!r:.80}; a reward dictionary maps names to numbers")
    reward = {
        name: _to_number(value, f"entry {name!r} of the reward is")
        for name, value in result.items()
        if name == reward_key or not (value is None or isinstance(value, str))
    }
    _check_key(reward, reward_key)
    answer = result.get(_ANSWER)
    return Verdict(reward=reward, extracted=answer if isinstance(answer, str) else None)


def _to_number(value: Any, what: str) -> float:
    number = value.item() if isinstance(value, np.generic) else value
    if not isinstance(number, Real):
        raise RewardError(f"{what} {value!r:.80}, a {type(value).__name__}; it must be a number")
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardError(f"{what} {value!r:.80}; it must be finite")
    return result


def _check_key(reward: Mapping[str, float], reward_key: str | None) -> None:
    if reward_key is None:
        raise RewardError(f"the reward has the entries {sorted(reward)}: set reward_key to one of them")
    if reward_key not in reward:
        raise RewardError(f"reward_key = {reward_key!r} is not in the reward, which has {sorted(reward)}")
