"""What all filters share: the view of a group as rollouts, its size, and its rewards.

Axes: G rollouts of a group.

Two promises are kept here, so that no filter can forget them: a group of the wrong size is
dropped before anything else is looked at, and a group with a member that is not scored is never
kept. A rollout counts once, however many samples an agent's forks made of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError, RewardError
from rollfeed.types import Correct, Drop, FilterDecision, Keep, Sample, SampleStatus, mean_number


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a group, as filters see it."""

    samples: tuple[Sample, ...]
    """At least one; several when an agent forked."""

    @property
    def status(self) -> SampleStatus:
        """The status of the last sample."""
        return self.samples[-1].status

    @property
    def response_length(self) -> int:
        """Response tokens of all samples."""
        return sum(sample.response_length for sample in self.samples)

    @property
    def response(self) -> str:
        """The texts of all samples, one after the other."""
        return "\n".join(sample.response for sample in self.samples)

    @property
    def correct(self) -> Correct:
        """What the verdict says of the rollout."""
        return self.samples[-1].correct

    def reward(self, reward_key: str | None) -> float | None:
        """Return the rollout's reward, the mean of its samples'; None when one of them is not scored.

        Raises:
            RewardError: If it is not finite, or a reward dictionary lacks the key.
        """
        if any(sample.reward is None for sample in self.samples):
            return None
        value = mean_number([sample.get_reward_value(reward_key) for sample in self.samples])
        if not math.isfinite(value):
            raise RewardError(f"rollout {self.samples[0].rollout_id} has reward {value}, which is not finite")
        return value


def members_of(samples: Sequence[Sample]) -> tuple[Member, ...]:
    """Return one member a rollout, in the order in which rollouts first appear."""
    by_rollout: dict[int, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    return tuple(Member(tuple(forks)) for forks in by_rollout.values())


@dataclass(frozen=True, kw_only=True)
class GroupRule(ABC):
    """A filter. Call it with the samples of one group."""

    n_samples_per_prompt: int
    """Rollouts a whole group has."""
    reward_key: str | None = None
    """Which entry of a reward dictionary counts."""

    def __post_init__(self) -> None:
        require(self.n_samples_per_prompt >= 1, "n_samples_per_prompt", self.n_samples_per_prompt, "at least 1")

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return Keep or Drop for the samples of one group.

        Raises:
            RewardError: If a reward is not finite, or a reward dictionary lacks ``reward_key``.
        """
        members = members_of(samples)
        if len(members) != self.n_samples_per_prompt:
            return Drop("wrong_size")
        return self.decide(members)

    @abstractmethod
    def decide(self, members: Sequence[Member]) -> FilterDecision:
        """Decide about a group of the right size."""


@dataclass(frozen=True, kw_only=True)
class ResponseRule(GroupRule):
    """A filter on anything but rewards; what it would keep is dropped if a member is not scored."""

    def decide(self, members: Sequence[Member]) -> FilterDecision:
        """Decide about a group of the right size."""
        decision = self.decide_responses(members)
        if isinstance(decision, Keep) and any(member.reward(self.reward_key) is None for member in members):
            return Drop("unscored")
        return decision

    @abstractmethod
    def decide_responses(self, members: Sequence[Member]) -> FilterDecision:
        """Decide about a group of the right size; its members may lack rewards."""


@dataclass(frozen=True, kw_only=True)
class RewardRule(GroupRule):
    """A filter on rewards; a group with an unscored member is dropped before it is asked."""

    def decide(self, members: Sequence[Member]) -> FilterDecision:
        """Decide about a group of the right size."""
        rewards = [member.reward(self.reward_key) for member in members]
        scored = [reward for reward in rewards if reward is not None]
        if len(scored) < len(rewards):
            return Drop("unscored")
        return self.decide_rewards(members, np.array(scored, np.float64))

    @abstractmethod
    def decide_rewards(self, members: Sequence[Member], rewards_G: NDArray[np.float64]) -> FilterDecision:
        """Decide about a scored group of the right size, one reward a rollout."""


def require(holds: bool, key: str, value: object, must_be: str) -> None:
    """Refuse a parameter that is out of range.

    Raises:
        ConfigError: Unless ``holds``; it names the key, the value and what it must be.
    """
    if not holds:
        raise ConfigError(f"{key} = {value!r}: must be {must_be}")


def require_finite(key: str, value: float) -> None:
    """Refuse NaN and infinities.

    Raises:
        ConfigError: If ``value`` is not a finite number.
    """
    require(math.isfinite(value), key, value, "a finite number")
