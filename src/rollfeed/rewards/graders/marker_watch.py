"""Says when nothing that a policy writes can get a reward of ``deepscaler``."""

from __future__ import annotations

import logging

from rollfeed.rewards.graders.mathematics import NO_MARKER
from rollfeed.types import FilterDecision, Group, Rollout, StepCommit

_RM_TYPES = ("deepscaler", "boxed_deepscaler")

_log = logging.getLogger(__name__)


class MarkerWatch:
    """Fits :class:`rollfeed.protocols.RolloutObserver`; warns once a step in which no response had a marker.

    ``rm_type`` is the grader of prompts that name none.
    """

    def __init__(self, *, rm_type: str | None) -> None:
        self._rm_type = rm_type
        self._num_graded = self._num_unmarked = 0

    def step_started(self, step: int) -> None:
        self._num_graded = self._num_unmarked = 0

    def group_submitted(self, group: Group) -> None:
        """Nothing is graded yet."""

    def rollout_finished(self, rollout: Rollout) -> None:
        """Nothing is graded yet."""

    def waiting(self, message: str) -> None:
        """Not of interest here."""

    def group_decided(self, group: Group, decision: FilterDecision) -> None:
        if group.prompt.metadata.get("rm_type", self._rm_type) not in _RM_TYPES:
            return
        verdicts = [rollout.verdict for rollout in group.rollouts if rollout.verdict is not None]
        self._num_graded += len(verdicts)
        self._num_unmarked += sum(verdict.detail == NO_MARKER for verdict in verdicts)

    def step_finished(self, commit: StepCommit) -> None:
        if self._num_graded and self._num_unmarked == self._num_graded:
            _log.warning(
                "step %d: none of the %d responses has </think> or ###Response, so that deepscaler gives 0 to all; use "
                "rm_type math for a policy that does not think first",
                commit.batch.step,
                self._num_graded,
            )
