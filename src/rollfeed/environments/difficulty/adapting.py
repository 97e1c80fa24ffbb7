"""The difficulty of one environment: what became of answers at each of its levels, and the policy that learns of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from rollfeed.faults import blaming, complaint
from rollfeed.protocols import DifficultyPolicy, LevelOutcome
from rollfeed.types import Group, SampleStatus

_SETTING = "plugins.difficulty_policy"
_NEWEST = 0.05
"""Weight of the newest group in the share of groups with spread."""


@dataclass(slots=True)
class LevelCounts:
    """Answers at one level since the run began."""

    num_groups: int = 0
    num_judged: int = 0
    """Rollouts that a verdict calls right or wrong."""
    num_correct: int = 0
    num_truncated: int = 0
    """Rollouts that ended at their length limit, mostly counted as wrong: where these are many, the limit may be what
    the level is too hard for."""
    num_all_right: int = 0
    """Groups without a wrong rollout."""
    num_all_wrong: int = 0


COLUMNS = ("level", *(field.name for field in fields(LevelCounts)))
"""What a row of a stored table has."""


class AdaptingEnvironment:
    """The levels of one environment, of which a policy chooses."""

    def __init__(self, *, version: int, policy: DifficultyPolicy) -> None:
        self.version = version
        self.policy = policy
        self.spread = 1.0
        """Share of the last groups that had right and wrong answers."""
        self._counts: dict[int, LevelCounts] = {}

    def weights(self, *, hardest: int | None) -> Mapping[int, float]:
        """Return the policy's levels up to the ``hardest`` that can be made; that one where all of them are harder.

        Raises:
            RunFailedError: If the policy raises, or returns something else than levels with their shares.
        """
        with blaming(_SETTING, self.policy):
            weights = self.policy.weights()
        if not isinstance(weights, Mapping) or not weights or not all(map(_is_share, weights.items())):
            told = f"returned {weights!r:.80}; weights() must return levels from 0 on, each with a share above 0"
            raise complaint(_SETTING, self.policy, told)
        if hardest is None:
            return weights
        return {level: weight for level, weight in weights.items() if level <= hardest} or {hardest: 1.0}

    def observe(self, group: Group, level: int) -> bool:
        """Learn of a scored group; return whether any verdict said if a rollout is right."""
        judged = group.judged()
        if not judged:
            return False
        outcome = LevelOutcome(level=level, num_judged=len(judged), num_correct=sum(judged))
        counts = self._counts.setdefault(level, LevelCounts())
        counts.num_groups += 1
        counts.num_judged += outcome.num_judged
        counts.num_correct += outcome.num_correct
        counts.num_truncated += sum(rollout.status is SampleStatus.TRUNCATED for rollout in group.rollouts)
        counts.num_all_right += outcome.num_correct == outcome.num_judged
        counts.num_all_wrong += outcome.num_correct == 0
        self.spread += _NEWEST * (outcome.has_spread - self.spread)
        with blaming(_SETTING, self.policy):
            self.policy.observe(outcome)
        return True

    def end_step(self, *, hardest: int | None) -> float | None:
        """Have the policy change the level; return the accuracy where it was looked at."""
        if hardest is not None:
            self.policy.level = min(self.policy.level, max(0, hardest))
        with blaming(_SETTING, self.policy):
            accuracy = self.policy.end_step(max_level=hardest)
        if not _is_level(self.policy.level) or not (accuracy is None or _is_number(accuracy)):
            told = f"has level {self.policy.level!r:.40} and returned {accuracy!r:.40}"
            promise = "end_step() must leave a whole number as level, and return an accuracy or None"
            raise complaint(_SETTING, self.policy, f"{told}; {promise}")
        return accuracy

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; the counts as rows of :data:`COLUMNS`."""
        with blaming(_SETTING, self.policy):
            policy = self.policy.state_dict()
        return {
            "policy": policy,
            "spread": self.spread,
            "levels": [[level, *astuple(counts)] for level, counts in sorted(self._counts.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_policy: bool) -> None:
        """Take what :meth:`state_dict` returned; of another policy's state only the level."""
        policy = state["policy"]
        self.policy.load_state_dict(policy if same_policy else {"level": policy["level"]})
        self.spread = state["spread"]
        self._counts = {level: LevelCounts(*counts) for level, *counts in state["levels"]}


def _is_level(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and math.isfinite(given)


def _is_share(given: tuple[object, object]) -> bool:
    level, share = given
    return _is_level(level) and isinstance(share, int | float) and 0.0 < share < math.inf
