"""The decisions of graders and filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import RewardError

Reward: TypeAlias = float | dict[str, float]
"""A number, or named numbers of which ``reward_key`` picks one."""


REWARD_TOLERANCE = 1e-6
"""Rewards closer together than this are equal: the deviation of equal float rewards is not exactly 0."""


def are_equal(rewards: NDArray[np.float64]) -> bool:
    """Whether no reward differs from another by more than ``REWARD_TOLERANCE``; so it is of fewer than two."""
    return len(rewards) < 2 or float(np.ptp(rewards)) <= REWARD_TOLERANCE


def mean_number(values: Sequence[float]) -> float:
    """Return the mean; of equal values exactly that value, which a sum divided by their number need not be."""
    return values[0] if all(value == values[0] for value in values) else math.fsum(values) / len(values)


def mean_reward(rewards: Sequence[Reward | None]) -> Reward:
    """Return the mean of the rewards of a rollout's samples; of dictionaries entry by entry.

    Raises:
        RewardError: If one is missing, or they are not all numbers or all dictionaries with the same entries.
    """
    numbers = [float(reward) for reward in rewards if isinstance(reward, int | float)]
    if len(numbers) == len(rewards):
        return mean_number(numbers)
    named = [reward for reward in rewards if isinstance(reward, dict)]
    if len(named) < len(rewards):
        raise RewardError(f"its samples have the rewards {list(rewards)}: they must be numbers, or all named ones")
    for entries in named:
        if missing := sorted(named[0].keys() ^ entries.keys()):
            raise RewardError(f"its samples have rewards of different entries: {missing[0]!r} is not in all of them")
    return {name: mean_number([float(entries[name]) for entries in named]) for name in named[0]}


class Correct(StrEnum):
    """Whether an answer is right; not every task defines it."""

    YES = "yes"
    NO = "no"
    UNDEFINED = "undefined"


class Outcome(StrEnum):
    """Whether grading itself worked. TIMEOUT and ERROR are never a reward of 0."""

    OK = "ok"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A grader's judgement of one response.

    Raises:
        ValueError: If an OK verdict has no reward or a non-finite one, or a failed one has a reward.
    """

    reward: Reward | None
    """None exactly when the outcome is not OK."""
    correct: Correct = Correct.UNDEFINED
    """Whether the answer is right."""
    format_ok: bool = True
    """Whether an answer could be found in the response at all."""
    extracted: str | None = None
    """The answer that was graded."""
    outcome: Outcome = Outcome.OK
    """Whether grading worked."""
    detail: str = ""
    """What the grader adds."""
    step_scores: tuple[float, ...] = ()
    """Scores of the steps or tokens that a process reward was made of, in their order."""

    @classmethod
    def graded(
        cls,
        right: bool,
        *,
        reward: float | None = None,
        format_ok: bool = True,
        extracted: str | None = None,
        detail: str = "",
    ) -> Verdict:
        """Return the verdict on an answer that is right or not: 1 or 0, unless ``reward`` says otherwise."""
        return cls(
            reward=float(right) if reward is None else reward,
            correct=Correct.YES if right else Correct.NO,
            format_ok=format_ok,
            extracted=extracted,
            detail=detail,
        )

    @classmethod
    def failed(cls, detail: str, outcome: Outcome = Outcome.ERROR) -> Verdict:
        """Return the verdict of a grading that did not work."""
        return cls(reward=None, outcome=outcome, detail=detail)

    def __post_init__(self) -> None:
        if (self.reward is None) is (self.outcome is Outcome.OK):
            raise ValueError(f"a verdict with outcome {self.outcome.value} cannot have reward {self.reward}")
        values = self.reward.values() if isinstance(self.reward, dict) else [self.reward]
        if self.reward is not None and not all(math.isfinite(value) for value in values if value is not None):
            raise ValueError(f"reward {self.reward} is not finite")


@dataclass(frozen=True, slots=True)
class Keep:
    """The group goes into the batch. True, where it is asked as a bool."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The group is not trained on. False, where it is asked as a bool."""

    reason: str
    """Short and stable: it becomes ``rollout/dynamic_filter/drop_<reason>``."""
    usable: bool = False
    """Whether the group may go into the batch after all when the step would otherwise be short."""

    def __bool__(self) -> bool:
        return False


FilterDecision: TypeAlias = Keep | Drop
