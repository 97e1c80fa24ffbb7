"""Measures how hard the levels of an environment are for a model, and says which one to start training at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollfeed.evaluation.results import SetResult
from rollfeed.types import SampleStatus

LOWEST_ACCURACY, HIGHEST_ACCURACY = 0.05, 0.60
"""Below, nearly no group has a right answer to learn from; above, little is left to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One level, measured."""

    level: int
    found: SetResult

    @property
    def accuracy_of_ended(self) -> float | None:
        """Share of right answers among those that ended before their length limit; None where none did."""
        ended = [
            right
            for group, right in zip(self.found.groups, self.found.right_P, strict=True)
            if right is not None and group.rollouts[0].status is not SampleStatus.TRUNCATED
        ]
        return sum(ended) / len(ended) if ended else None

    @property
    def is_cut_short(self) -> bool:
        """Whether the length limit depresses the accuracy by more than 5 percentage points."""
        accuracy, of_ended = self.found.accuracy, self.accuracy_of_ended
        if accuracy is None or not self.found.truncated_ratio:
            return False
        return of_ended is None or of_ended > accuracy + 0.05

    @property
    def has_headroom(self) -> bool:
        """Whether the accuracy is one to start training at."""
        accuracy = self.found.accuracy
        return accuracy is not None and LOWEST_ACCURACY <= accuracy <= HIGHEST_ACCURACY


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All levels of an environment that were measured, lowest first."""

    environment_id: str
    levels: tuple[LevelResult, ...]
    seconds: float
    unusable: Mapping[int, str] = field(default_factory=dict)
    """Levels that could not be asked, with the cause."""

    @property
    def recommended(self) -> int | None:
        """The lowest level of which 5 to 60 % are solved; None where no level is."""
        return next((each.level for each in self.levels if each.has_headroom), None)
