"""Measures how hard the levels of an environment are for a model, and says which one to start training at."""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.evaluation.results import SetResult

LOWEST_ACCURACY, HIGHEST_ACCURACY = 0.05, 0.60
"""Below, nearly no group has a right answer to learn from; above, little is left to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One level, measured."""

    level: int
    found: SetResult

    @property
    def has_headroom(self) -> bool:
        """Whether the accuracy is one to start training at."""
        accuracy = self.found.accuracy
        return accuracy is not None and LOWEST_ACCURACY <= accuracy <= HIGHEST_ACCURACY


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All levels, lowest first."""

    levels: tuple[LevelResult, ...]
    seconds: float

    @property
    def recommended(self) -> int | None:
        """The lowest level of which 5 to 60 % are solved; None where no level is."""
        return next((each.level for each in self.levels if each.has_headroom), None)
