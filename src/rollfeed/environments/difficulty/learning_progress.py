"""``learning_progress``: the levels at which the accuracy changes.

Source: Matiisen et al., "Teacher-Student Curriculum Learning" (arXiv:1707.00183), for progress as the absolute
difference of two averages; there all tasks are there from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.environments.difficulty.rlve import FixedPolicy
from rollfeed.protocols import LevelOutcome

_FAST, _SLOW = 0.2, 0.05
"""Weights of the newest group in the two averages."""
_LEAST_WEIGHT = 0.02
"""Next to the progress of a level."""
_UP, _DOWN = 0.5, 0.1
"""Accuracies at the hardest level from which on the next one is tried, too, and below which it is left out."""
_LEAST_GROUPS = 4
"""At the level since it changed."""


class LearningProgressPolicy(FixedPolicy):
    """Chooses levels by how much the accuracy there rises or falls: those of the window, and easier ones that change.

    Where a level is forgotten, it is practised again.
    """

    def __init__(self, level: int, window_size: int) -> None:
        super().__init__(level, window_size)
        self._averages: dict[int, tuple[float, float]] = {}
        """The fast and the slow average of the groups' accuracies, by level."""
        self._num_new = 0

    def weights(self) -> dict[int, float]:
        """Return the window's levels and those below that change."""
        weights = dict.fromkeys(self.window, _LEAST_WEIGHT)
        for level, (fast, slow) in sorted(self._averages.items()):
            if level <= self.level and fast != slow:
                weights[level] = weights.get(level, 0.0) + abs(fast - slow)
        return weights

    def observe(self, outcome: LevelOutcome) -> None:
        """Add a group to the averages of its level."""
        value = outcome.accuracy
        fast, slow = self._averages.get(outcome.level, (value, value))
        self._averages[outcome.level] = fast + _FAST * (value - fast), slow + _SLOW * (value - slow)
        self._num_new += outcome.level == self.level

    def end_step(self, *, max_level: int | None) -> float | None:
        """Go up where the hardest level is solved often enough, down where it is hardly ever."""
        if self._num_new < _LEAST_GROUPS:
            return None
        fast, before = self._averages[self.level][0], self.level
        if fast >= _UP:
            self.level += max_level is None or self.level < max_level
        elif fast < _DOWN:
            self.level = max(0, self.level - 1)
        if self.level != before:
            self._num_new = 0
        return fast

    def state_dict(self) -> dict[str, Any]:
        averages = {str(level): list(of) for level, of in sorted(self._averages.items())}
        return {**super().state_dict(), "num_new": self._num_new, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the level and the averages; of another policy's state the level."""
        super().load_state_dict(state)
        self._num_new, averages = state.get("num_new", 0), state.get("averages", {})
        self._averages = {int(level): (fast, slow) for level, (fast, slow) in averages.items()}
