"""The built-in filters: which groups of rollouts teach something.

Two promises are kept for all of them: a group of the wrong size is dropped before anything else is looked at, and a
group with a rollout that is not scored is never kept. A rollout counts once, however many samples it forked into.

A rollout is *correct* when its verdict says so; where that says nothing, when its reward is above ``threshold``.
Rewards are compared in float64: in float32 the standard deviation of eight equal rewards of 0.1 is above 0.

Axes: G rollouts of a group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError, RewardError
from rollfeed.types import REWARD_TOLERANCE, Correct, Drop, FilterDecision, Keep, Rollout, Sample, SampleStatus


class Bound(NamedTuple):
    """A condition on a parameter, besides its type."""

    must_be: str
    holds: Callable[[Any], bool]


Share: TypeAlias = Annotated[float, Bound("between 0 and 1", lambda value: 0.0 <= value <= 1.0)]
PositiveShare: TypeAlias = Annotated[float, Bound("above 0 and at most 1", lambda value: 0.0 < value <= 1.0)]
Finite: TypeAlias = Annotated[float, Bound("a finite number", math.isfinite)]
Tolerance: TypeAlias = Annotated[float, Bound("finite and at least 0", lambda value: 0.0 <= value < math.inf)]
Count: TypeAlias = Annotated[int, Bound("at least 0", lambda value: value >= 0)]
Size: TypeAlias = Annotated[int, Bound("at least 1", lambda value: value >= 1)]


@dataclass(frozen=True, kw_only=True)
class GroupRule(ABC):
    """A filter. Call it with the samples of one group. Raises ConfigError if a parameter is out of its range."""

    judges_rewards: ClassVar[bool] = True
    """Whether a group that is not scored is dropped before it is judged, and not after."""

    n_samples_per_prompt: Size
    """Rollouts a whole group has."""
    reward_key: str | None = None
    """Which entry of a reward dictionary counts."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            for bound in getattr(hint, "__metadata__", ()):
                self._require(name, bound.must_be, bound.holds(getattr(self, name)))

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return Keep or Drop for the samples of one group.

        Raises:
            RewardError: If a reward is not finite, or a reward dictionary lacks ``reward_key``.
        """
        by_rollout: dict[int, list[Sample]] = {}
        for sample in samples:
            by_rollout.setdefault(sample.rollout_id, []).append(sample)
        rollouts = [Rollout(rollout_id=number, samples=tuple(forks)) for number, forks in by_rollout.items()]
        if len(rollouts) != self.n_samples_per_prompt:
            return Drop("wrong_size")
        if self.judges_rewards and not _are_scored(rollouts):
            return Drop("unscored")
        if (reason := self._reason(rollouts)) is not None:
            return Drop(reason, usable=self._is_usable)
        if not self.judges_rewards:
            if not _are_scored(rollouts):
                return Drop("unscored")
            self._rewards_of(rollouts)
        return Keep()

    @abstractmethod
    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        """Return why a group of the right size is dropped; None if it is kept."""

    @property
    def _is_usable(self) -> bool:
        """Whether what the rule drops is better than a batch that is short."""
        return False

    def _rewards_of(self, rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
        rewards = [rollout.get_reward_value(self.reward_key) for rollout in rollouts]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            if not math.isfinite(reward):
                raise RewardError(f"rollout {rollout.rollout_id} has reward {reward}, which is not finite")
        return np.array(rewards, np.float64)

    def _require(self, name: str, must_be: str, holds: bool) -> None:
        if not holds:
            raise ConfigError(f"{name} = {getattr(self, name)!r}: must be {must_be}")


@dataclass(frozen=True, kw_only=True)
class CompleteGroup(GroupRule):
    """Drop groups with a rollout that neither completed nor was truncated."""

    judges_rewards = False

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        ended = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        return None if all(rollout.samples[-1].status in ended for rollout in rollouts) else "incomplete"


@dataclass(frozen=True, kw_only=True)
class AnySuccess(GroupRule):
    """Drop groups in which no rollout completed: all were truncated, aborted or failed."""

    judges_rewards = False

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        return None if _num_with(rollouts, SampleStatus.COMPLETED) else "no_success"


@dataclass(frozen=True, kw_only=True)
class TruncatedFraction(GroupRule):
    """Drop groups of which more than ``maximum`` was truncated."""

    judges_rewards = False

    maximum: Share = 0.5
    """A fraction of the rollouts."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        return "truncated" if _num_with(rollouts, SampleStatus.TRUNCATED) / len(rollouts) > self.maximum else None


@dataclass(frozen=True, kw_only=True)
class ResponseLength(GroupRule):
    """Drop groups with a response that is shorter or longer than the bounds."""

    judges_rewards = False

    minimum: Count = 1
    """Response tokens that every rollout must have."""
    maximum: int | None = None
    """Response tokens that no rollout may exceed; None sets no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.maximum is None or self.maximum >= self.minimum
        self._require("maximum", f"at least minimum = {self.minimum}", holds)

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        lengths = [rollout.response_tokens for rollout in rollouts]
        if min(lengths) < self.minimum:
            return "too_short"
        return "too_long" if self.maximum is not None and max(lengths) > self.maximum else None


@dataclass(frozen=True, kw_only=True)
class ResponseDiversity(GroupRule):
    """Drop groups that say the same thing too often. Responses are compared without regard to case and white space."""

    judges_rewards = False

    minimum: PositiveShare = 0.5
    """Distinct responses as a fraction of the rollouts."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        return None if _diversity(rollouts) >= self.minimum else "low_diversity"


@dataclass(frozen=True, kw_only=True)
class QualityAndDiversity(GroupRule):
    """Drop groups whose best reward is below ``minimum_reward``, and those that repeat themselves."""

    minimum_reward: Finite
    """The best reward must be at least this."""
    minimum_diversity: PositiveShare = 0.5
    """Distinct responses as a fraction of the rollouts."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        if self._rewards_of(rollouts).max() < self.minimum_reward:
            return "low_reward"
        return None if _diversity(rollouts) >= self.minimum_diversity else "low_diversity"


@dataclass(frozen=True, kw_only=True)
class RewardStd(GroupRule):
    """Drop groups whose rewards are all equal.

    Every rollout of such a group has advantage 0 under group-relative baselines: it costs a training pass and teaches
    nothing. The reason ``zero_std_<r>`` names the first reward, to one decimal. Source: DAPO, "Dynamic Sampling"
    (arXiv:2503.14476).
    """

    tolerance: Tolerance = REWARD_TOLERANCE
    """The population standard deviation must be above it."""
    keep_when_short: bool = False
    """Whether a dropped group may still be used when the step would otherwise be short."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        rewards_G = self._rewards_of(rollouts)
        # Measured from the first reward, equal rewards have a deviation of exactly 0 at any magnitude.
        if (rewards_G - rewards_G[0]).std() > self.tolerance:
            return None
        return f"zero_std_{round(float(rewards_G[0]), 1) + 0.0:.1f}"  # + 0.0 turns -0.0 into 0.0

    @property
    def _is_usable(self) -> bool:
        return self.keep_when_short


@dataclass(frozen=True, kw_only=True)
class _ThresholdRule(GroupRule):
    """A rule that counts correct rollouts."""

    threshold: Finite = 0.0
    """A reward above it is correct, where the verdict does not say whether the rollout is."""
    strict: bool = True
    """Whether a reward must be above the threshold; otherwise one at it is correct, too."""

    def _num_correct(self, rollouts: Sequence[Rollout]) -> int:
        rewards_G = self._rewards_of(rollouts)
        above_G = rewards_G > self.threshold if self.strict else rewards_G >= self.threshold
        verdicts = [rollout.samples[-1].correct for rollout in rollouts]
        return sum(
            bool(above) if verdict is Correct.UNDEFINED else verdict is Correct.YES
            for verdict, above in zip(verdicts, above_G, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class AllCorrect(_ThresholdRule):
    """Drop groups in which every rollout is correct: too easy."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        return "all_correct" if self._num_correct(rollouts) == len(rollouts) else None


@dataclass(frozen=True, kw_only=True)
class AllWrong(_ThresholdRule):
    """Drop groups in which no rollout is correct: too hard."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        return "all_wrong" if self._num_correct(rollouts) == 0 else None


@dataclass(frozen=True, kw_only=True)
class AtLeastHalfCorrect(_ThresholdRule):
    """Drop groups in which at least ``G // 2`` rollouts are correct, so that hard prompts remain.

    A group of one is dropped when its rollout is correct.
    """

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        half = max(1, len(rollouts) // 2)
        return "at_least_half_correct" if self._num_correct(rollouts) >= half else None


@dataclass(frozen=True, kw_only=True)
class MinimumReward(GroupRule):
    """Drop groups whose best rollout has a reward below ``minimum``."""

    minimum: Finite
    """The best reward must be at least this."""

    def _reason(self, rollouts: Sequence[Rollout]) -> str | None:
        return None if self._rewards_of(rollouts).max() >= self.minimum else "low_reward"


def _are_scored(rollouts: Sequence[Rollout]) -> bool:
    return all(sample.reward is not None for rollout in rollouts for sample in rollout.samples)


def _num_with(rollouts: Sequence[Rollout], status: SampleStatus) -> int:
    return sum(rollout.samples[-1].status is status for rollout in rollouts)


def _diversity(rollouts: Sequence[Rollout]) -> float:
    """Return distinct responses as a fraction of the rollouts."""
    texts = ["\n".join(sample.response for sample in rollout.samples) for rollout in rollouts]
    return len({" ".join(text.casefold().split()) for text in texts}) / len(texts)
