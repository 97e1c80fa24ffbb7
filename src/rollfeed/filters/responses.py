"""Filters on what a group's rollouts are like: their status, length and variety."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollfeed.filters.group_rule import Member, ResponseRule, RewardRule, require, require_finite
from rollfeed.types import Drop, FilterDecision, Keep, SampleStatus


@dataclass(frozen=True, kw_only=True)
class CompleteGroup(ResponseRule):
    """Drop groups with a rollout that did not come to its end: aborted, failed or pending.

    Truncated rollouts came to theirs.
    """

    def decide_responses(self, members: Sequence[Member]) -> FilterDecision:
        """Decide by the members' statuses."""
        ended = {SampleStatus.COMPLETED, SampleStatus.TRUNCATED}
        return Keep() if all(member.status in ended for member in members) else Drop("incomplete")


@dataclass(frozen=True, kw_only=True)
class AnySuccess(ResponseRule):
    """Drop groups in which no rollout completed: all were truncated, aborted or failed."""

    def decide_responses(self, members: Sequence[Member]) -> FilterDecision:
        """Decide by the members' statuses."""
        return Keep() if any(member.status is SampleStatus.COMPLETED for member in members) else Drop("no_success")


@dataclass(frozen=True, kw_only=True)
class TruncatedFraction(ResponseRule):
    """Drop groups of which more than ``maximum`` was truncated."""

    maximum: float = 0.5
    """A fraction of the rollouts, 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.maximum <= 1.0, "maximum", self.maximum, "between 0 and 1")

    def decide_responses(self, members: Sequence[Member]) -> FilterDecision:
        """Decide by the members' statuses."""
        num_truncated = sum(member.status is SampleStatus.TRUNCATED for member in members)
        return Drop("truncated") if num_truncated / len(members) > self.maximum else Keep()


@dataclass(frozen=True, kw_only=True)
class ResponseLength(ResponseRule):
    """Drop groups with a response that is shorter or longer than the bounds."""

    minimum: int = 1
    """Response tokens that every rollout must have. At least 0."""
    maximum: int | None = None
    """Response tokens that no rollout may exceed; None sets no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.minimum >= 0, "minimum", self.minimum, "at least 0")
        if self.maximum is not None:
            require(self.maximum >= self.minimum, "maximum", self.maximum, f"at least minimum = {self.minimum}")

    def decide_responses(self, members: Sequence[Member]) -> FilterDecision:
        """Decide by the members' numbers of response tokens."""
        lengths = [member.response_length for member in members]
        if min(lengths) < self.minimum:
            return Drop("too_short")
        if self.maximum is not None and max(lengths) > self.maximum:
            return Drop("too_long")
        return Keep()


@dataclass(frozen=True, kw_only=True)
class ResponseDiversity(ResponseRule):
    """Drop groups that say the same thing too often.

    Responses are compared without regard to case and white space.
    """

    minimum: float = 0.5
    """Distinct responses as a fraction of the rollouts. Above 0, at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 < self.minimum <= 1.0, "minimum", self.minimum, "above 0 and at most 1")

    def decide_responses(self, members: Sequence[Member]) -> FilterDecision:
        """Decide by the number of distinct responses."""
        return Keep() if _is_diverse(members, self.minimum) else Drop("low_diversity")


@dataclass(frozen=True, kw_only=True)
class QualityAndDiversity(RewardRule):
    """Drop groups whose best reward is below ``minimum_reward``, and those that repeat themselves."""

    minimum_reward: float
    """The best reward must be at least this."""
    minimum_diversity: float = 0.5
    """Distinct responses as a fraction of the rollouts. Above 0, at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_finite("minimum_reward", self.minimum_reward)
        holds = 0.0 < self.minimum_diversity <= 1.0
        require(holds, "minimum_diversity", self.minimum_diversity, "above 0 and at most 1")

    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide by the best reward, then by the number of distinct responses."""
        if rewards_G.max() < self.minimum_reward:
            return Drop("low_reward")
        return Keep() if _is_diverse(members, self.minimum_diversity) else Drop("low_diversity")


def _is_diverse(members: Sequence[Member], minimum: float) -> bool:
    distinct = {" ".join(member.response.casefold().split()) for member in members}
    return len(distinct) / len(members) >= minimum
