"""Policies of difficulty: which levels of an environment problems are made at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelOutcome:
    """The verdicts on one group, whose problem is of one level."""

    level: int
    num_judged: int
    """Rollouts that a verdict calls right or wrong; at least 1."""
    num_correct: int

    @property
    def accuracy(self) -> float:
        """Share of right ones."""
        return self.num_correct / self.num_judged

    @property
    def has_spread(self) -> bool:
        """Whether some are right and some wrong, so that the group teaches something."""
        return 0 < self.num_correct < self.num_judged


class DifficultyPolicy(Protocol):
    """Chooses the levels of one environment. *Extension point* (``plugins.difficulty_policy``).

    All follows from the observations alone: no clock, no randomness. Its state is committed with the batch, and between
    two commits nothing changes.
    """

    level: int
    """The hardest level that problems are made at; lowered from outside where that turns out to be broken."""

    def weights(self) -> Mapping[int, float]:
        """Return the levels to make problems at, each with its share relative to the others', above 0."""

    def observe(self, outcome: LevelOutcome) -> None:
        """Learn what became of a group, of whatever level."""

    def end_step(self, *, max_level: int | None) -> float | None:
        """Change the level by at most one after the groups of a step, never above ``max_level``.

        Returns:
            The accuracy at the level where it was looked at, else None.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that :meth:`state_dict` returned."""
