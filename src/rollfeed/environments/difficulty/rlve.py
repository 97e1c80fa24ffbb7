"""``rlve``: the published rule, and ``fixed``: the same levels for ever.

Source: Zeng et al., "RLVE: Scaling Up Reinforcement Learning for Language Models with Adaptive Verifiable Environments"
(arXiv:2511.07317).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.protocols import DifficultyPolicy, LevelOutcome


class FixedPolicy(DifficultyPolicy):
    """Stays where it is: a window of levels that ends with ``level``, uniformly."""

    def __init__(self, level: int, window_size: int) -> None:
        self.level = level
        self._window_size = window_size

    @property
    def window(self) -> range:
        """The levels of the window; fewer above 0."""
        return range(max(0, self.level - self._window_size + 1), self.level + 1)

    def weights(self) -> dict[int, float]:
        """Return every level of the window with the same weight."""
        return dict.fromkeys(self.window, 1.0)

    def observe(self, outcome: LevelOutcome) -> None:
        """Learn nothing."""

    def end_step(self, *, max_level: int | None) -> float | None:
        """Change nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a level."""
        self.level = state["level"]


class RlvePolicy(FixedPolicy):
    """Goes up by one when the mean accuracy at the hardest level is high enough; never down.

    It is looked at when there are enough rollouts at that level, and counted anew from there on, whether it was high
    enough or not. Easier levels do not count.
    """

    def __init__(self, level: int, window_size: int, *, least_accuracy: float, least_rollouts: int) -> None:
        super().__init__(level, window_size)
        self._least_accuracy = least_accuracy
        self._least_rollouts = least_rollouts
        self._num_judged = self._num_correct = 0

    def observe(self, outcome: LevelOutcome) -> None:
        """Count the rollouts of a group at the hardest level."""
        if outcome.level == self.level:
            self._num_judged += outcome.num_judged
            self._num_correct += outcome.num_correct

    def end_step(self, *, max_level: int | None) -> float | None:
        """Look at the accuracy, where there are enough rollouts."""
        if self._num_judged < self._least_rollouts:
            return None
        accuracy = self._num_correct / self._num_judged
        self._num_judged = self._num_correct = 0
        if accuracy >= self._least_accuracy and (max_level is None or self.level < max_level):
            self.level += 1
        return accuracy

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_judged": self._num_judged, "num_correct": self._num_correct}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take level and counts; those of another policy count nothing yet."""
        super().load_state_dict(state)
        self._num_judged, self._num_correct = state.get("num_judged", 0), state.get("num_correct", 0)
