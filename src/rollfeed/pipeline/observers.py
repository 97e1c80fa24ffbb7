"""Observers of a step: none, and several as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollfeed.protocols import RolloutObserver
from rollfeed.types import FilterDecision, Group, Rollout, StepCommit


class Observers:
    """Passes everything on to any number of observers, also none."""

    def __init__(
        self, observers: Sequence[RolloutObserver] = (), *, on_rollout: Callable[[], None] | None = None
    ) -> None:
        self._observers = tuple(observers)
        self.on_rollout = on_rollout

    def step_started(self, step: int) -> None:
        for observer in self._observers:
            observer.step_started(step)

    def group_submitted(self, group: Group) -> None:
        for observer in self._observers:
            observer.group_submitted(group)

    def rollout_finished(self, rollout: Rollout) -> None:
        if self.on_rollout is not None:
            self.on_rollout()
        for observer in self._observers:
            observer.rollout_finished(rollout)

    def group_decided(self, group: Group, decision: FilterDecision) -> None:
        for observer in self._observers:
            observer.group_decided(group, decision)

    def waiting(self, message: str) -> None:
        for observer in self._observers:
            observer.waiting(message)

    def step_finished(self, commit: StepCommit) -> None:
        for observer in self._observers:
            observer.step_finished(commit)
