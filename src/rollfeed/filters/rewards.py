"""Filters on the rewards of a group.

A member is *correct* when its verdict says so; where that says nothing, when its reward is above
``threshold``. Rewards are compared in float64: in float32 the standard deviation of eight equal
rewards of 0.1 is above 0.

Axes: G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollfeed.filters.group_rule import Member, RewardRule, require, require_finite
from rollfeed.types import REWARD_TOLERANCE, Correct, Drop, FilterDecision, Keep


@dataclass(frozen=True, kw_only=True)
class RewardStd(RewardRule):
    """Drop groups whose rewards are all equal.

    Every rollout of such a group has advantage 0 under group-relative baselines: it costs a
    training pass and teaches nothing. The reason ``zero_std_<r>`` names the first reward, to one
    decimal. Source: DAPO, "Dynamic Sampling" (arXiv:2503.14476).
    """

    tolerance: float = REWARD_TOLERANCE
    """The population standard deviation must be above it. At least 0."""
    keep_when_short: bool = False
    """Whether a dropped group may still be used when the step would otherwise be short."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.tolerance < np.inf, "tolerance", self.tolerance, "finite and at least 0")

    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide by the spread of the rewards."""
        # Measured from the first reward, equal rewards have a deviation of exactly 0 at any magnitude.
        if (rewards_G - rewards_G[0]).std() > self.tolerance:
            return Keep()
        first = round(float(rewards_G[0]), 1) + 0.0  # + 0.0 turns -0.0 into 0.0
        return Drop(f"zero_std_{first:.1f}", usable=self.keep_when_short)


@dataclass(frozen=True, kw_only=True)
class _ThresholdRule(RewardRule):
    """A rule that counts correct members."""

    threshold: float = 0.0
    """A reward above it is correct, where the verdict does not say whether the rollout is."""
    strict: bool = True
    """Whether a reward must be above the threshold; otherwise one at it is correct, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("threshold", self.threshold)

    def num_correct(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> int:
        """Return how many members are correct."""
        above_G = rewards_G > self.threshold if self.strict else rewards_G >= self.threshold
        return sum(
            bool(above) if member.correct is Correct.UNDEFINED else member.correct is Correct.YES
            for member, above in zip(members, above_G, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class AllCorrect(_ThresholdRule):
    """Drop groups in which every rollout is correct: too easy."""

    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide by the number of correct members."""
        return Drop("all_correct") if self.num_correct(members, rewards_G) == len(rewards_G) else Keep()


@dataclass(frozen=True, kw_only=True)
class AllWrong(_ThresholdRule):
    """Drop groups in which no rollout is correct: too hard."""

    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide by the number of correct members."""
        return Drop("all_wrong") if self.num_correct(members, rewards_G) == 0 else Keep()


@dataclass(frozen=True, kw_only=True)
class AtLeastHalfCorrect(_ThresholdRule):
    """Drop groups in which at least ``G // 2`` rollouts are correct, so that hard prompts remain.

    A group of one is dropped when its rollout is correct.
    """

    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide by the number of correct members."""
        half = max(1, len(rewards_G) // 2)
        return Drop("at_least_half_correct") if self.num_correct(members, rewards_G) >= half else Keep()


@dataclass(frozen=True, kw_only=True)
class MinimumReward(RewardRule):
    """Drop groups whose best rollout has a reward below ``minimum``."""

    minimum: float
    """The best reward must be at least this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("minimum", self.minimum)

    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide by the best reward."""
        return Keep() if rewards_G.max() >= self.minimum else Drop("low_reward")
