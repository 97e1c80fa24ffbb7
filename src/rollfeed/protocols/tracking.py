"""Trackers: receive the metrics of a run, and samples where they take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

SampleRow: TypeAlias = Mapping[str, str | float | int | None]
"""A sample as trackers show it: columns ``source``, ``prompt``, ``response``, ``label``, ``reward``, ``status``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run, or the part of one that a process makes, as a tracker is told of it at the start."""

    name: str
    project: str
    settings: Mapping[str, Any]
    """All settings by dotted keys, as JSON values; without variables for other programs."""
    folder: Path
    """In the run directory, for the tracker to make and write to."""
    first_step: int = 0
    """The step that comes next; above 0 where an earlier process made those before it."""
    going_on: str | None = None
    """What the tracker called the run when an earlier process began it; None where it is to begin a new one."""
    went_back: bool = False
    """Whether steps from ``first_step`` on, which the tracker has, are made anew."""
    group: str | None = None
    """Other runs of the same one belong to it."""


class Tracker(Protocol):
    """Receives metrics: of each committed step, each update and each evaluation. *Extension point*.

    Called in a thread of its own, one call after another. What it raises is told once, and never ends a run.
    """

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record metrics. A step comes once with those of its batch, and in training once with those of its update.

        Those of an evaluation, ``eval/...``, have the number of batches trained on before it as their step.
        """

    def close(self) -> None:
        """Flush and end."""


@runtime_checkable
class RunTracker(Tracker, Protocol):
    """A tracker that is told of the run before all else, and gets samples. *Extension point*."""

    def start(self, run: TrackedRun) -> str:
        """Begin, or go on; return what the tracker calls the run, which it gets back as ``going_on``."""

    def log_samples(self, rows: Sequence[SampleRow], *, step: int, name: str) -> None:
        """Record a table: ``name`` is ``samples``, or ``eval/<set>/samples``. All rows have the same columns."""
