"""``band``: the hardest level is one that is sometimes solved, and goes down as well as up.

The constants are chosen by ``bench/difficulty.py``, for the largest share of groups that teach something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollfeed.environments.difficulty.rlve import FixedPolicy
from rollfeed.protocols import LevelOutcome

_UP, _DOWN = 0.6, 0.2
"""Accuracies at the hardest level above and below which it is another; between them it stays."""
_CONFIDENCE = 0.9
_KEEP = 0.9
"""Worth of a group when the next one of its level has come."""
_LEAST_GROUPS = 4
"""At the level since it changed."""
_SHARPNESS = 3
"""The power of p (1 - p) in a level's weight."""
_LEAST_WEIGHT = 0.04
"""Next to 1 for a level that teaches most."""


@dataclass(slots=True)
class LevelEstimate:
    """Sums over the groups of one level, in which each counts less the longer ago it was."""

    num_groups: float = 0.0
    accuracies: float = 0.0
    spreads: float = 0.0
    """Of p (1 - p) for each problem's own chance p to be solved, estimated without bias."""
    num_judged: float = 0.0

    def add(self, outcome: LevelOutcome) -> None:
        """Take in a group."""
        count, accuracy = outcome.num_judged, outcome.accuracy
        spread = accuracy * (1 - accuracy) * count / (count - 1) if count > 1 else 0.0
        self.num_groups = self.num_groups * _KEEP + 1
        self.accuracies = self.accuracies * _KEEP + accuracy
        self.spreads = self.spreads * _KEEP + spread
        self.num_judged = self.num_judged * _KEEP + count

    def learnable(self) -> float:
        """Return the mean of p (1 - p), between 0 and 1/4, which a level of which nothing is known has."""
        return (self.spreads + 0.25) / (self.num_groups + 1)

    def chance_above(self, accuracy: float) -> float:
        """Return the chance that the level's accuracy is above a bound.

        It is the posterior Beta distribution's, from a uniform prior. A group is worth as many independent rollouts as
        its size and the correlation within groups leave, 1 where they are all alike.
        """
        # Imported here: mpmath is needed where a level is looked at, not where rollfeed starts.
        from mpmath import betainc

        # As if a group had come before that is half right, with half the spread of independent rollouts.
        mean = (self.accuracies + 0.5) / (self.num_groups + 1)
        within = (self.spreads + 0.125) / (self.num_groups + 1) / (mean * (1 - mean))
        correlation, size = min(1.0, max(0.0, 1 - within)), self.num_judged / self.num_groups
        trials = size / (1 + (size - 1) * correlation)
        right, wrong = self.accuracies * trials, max(0.0, self.num_groups - self.accuracies) * trials
        return float(betainc(1 + right, 1 + wrong, accuracy, 1, regularized=True))


class BandPolicy(FixedPolicy):
    """Goes up when the accuracy at the hardest level is surely above 0.6, down when it is surely below 0.2.

    Levels of the window are chosen by how much they teach: by p (1 - p), where p is the chance that a problem of the
    level is solved. None is left out, so that what becomes easier or harder again is noticed.
    """

    def __init__(self, level: int, window_size: int) -> None:
        super().__init__(level, window_size)
        self._estimates: dict[int, LevelEstimate] = {}
        self._num_new = 0
        """Groups at the level since it changed."""
        self._is_falling = False
        """Whether it has just gone down: then what is known of the next level is new enough, as that was drawn, too."""

    def weights(self) -> dict[int, float]:
        """Return the window's levels; one of which nothing is known counts as one that teaches most."""
        unknown = LevelEstimate()
        return {
            level: _LEAST_WEIGHT + (4 * self._estimates.get(level, unknown).learnable()) ** _SHARPNESS
            for level in self.window
        }

    def observe(self, outcome: LevelOutcome) -> None:
        """Add a group to what is known of its level."""
        self._estimates.setdefault(outcome.level, LevelEstimate()).add(outcome)
        self._num_new += outcome.level == self.level

    def end_step(self, *, max_level: int | None) -> float | None:
        """Look at the hardest level, where there are new groups enough."""
        estimate = self._estimates.get(self.level)
        has_waited = self._num_new >= _LEAST_GROUPS
        if estimate is None or not (has_waited or self._is_falling):
            return None
        before, accuracy = self.level, estimate.accuracies / estimate.num_groups
        # A bound is surely passed only where the mean has passed it.
        if has_waited and accuracy > _UP and estimate.chance_above(_UP) > _CONFIDENCE:
            self.level += max_level is None or self.level < max_level
        elif accuracy < _DOWN and estimate.chance_above(_DOWN) < 1 - _CONFIDENCE:
            self.level = max(0, self.level - 1)
        if self.level != before:
            self._num_new = 0
            # What was known of levels that come back is long ago then.
            self._estimates = {level: of for level, of in self._estimates.items() if level in self.window}
        self._is_falling = self.level < before
        return accuracy

    def state_dict(self) -> dict[str, Any]:
        """Return the level, and what is known of those of the window."""
        estimates = {str(level): asdict(estimate) for level, estimate in sorted(self._estimates.items())}
        changes = {"num_new": self._num_new, "is_falling": self._is_falling}
        return {**super().state_dict(), **changes, "estimates": estimates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the level and what is known; of another policy's state the level."""
        super().load_state_dict(state)
        self._num_new, self._is_falling = state.get("num_new", 0), state.get("is_falling", False)
        estimates = state.get("estimates", {})
        self._estimates = {int(level): LevelEstimate(**estimate) for level, estimate in estimates.items()}
