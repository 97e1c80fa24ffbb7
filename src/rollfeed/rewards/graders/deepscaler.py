"""Grader ``deepscaler``: as ``math``, for models that think first; without the end of thinking the answer is 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rollfeed.answers import MAX_CHARS, find_box, normalize
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import undecidable
from rollfeed.rewards.mathematics import grade_equality, math_labels, no_answer, one_or_zero
from rollfeed.types import FilterDecision, Group, Rollout, StepCommit, Verdict

_RM_TYPES = ("deepscaler", "boxed_deepscaler")
_THINK_END = "</think>"
_RESPONSE = "###Response"
_NO_MARKER = "no </think> and no ###Response in the response"
"""``detail`` of a verdict that is 0 because nothing says where the answer begins."""

_log = logging.getLogger(__name__)


def grade_deepscaler(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the last ``\boxed{...}`` of the answer part equals the label, or one of a list; else 0.

    The answer part is what follows the last ``</think>``, else the first ``###Response``; else there is
    none.
    """
    labels = math_labels(label)
    if labels is None:
        return undecidable("deepscaler", label, "a text, a number or a list of them")
    text = _answer_part(response)
    if text is None:
        return no_answer(_NO_MARKER)
    box = find_box(normalize(text[-MAX_CHARS:]))
    if box is None or not box.strip():
        return no_answer("no boxed answer")
    return grade_equality(box, labels, verdict=one_or_zero)


def _answer_part(response: str) -> str | None:
    if _THINK_END in response:
        return response.rpartition(_THINK_END)[2]
    _, marker, after = response.partition(_RESPONSE)
    return after if marker else None


class MarkerWatch:
    """Fits :class:`rollfeed.protocols.RolloutObserver`; warns once a step in which no response had a marker.

    Args:
        rm_type: Grader of prompts that name none.
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
        self._num_unmarked += sum(verdict.detail == _NO_MARKER for verdict in verdicts)

    def step_finished(self, commit: StepCommit) -> None:
        if self._num_graded and self._num_unmarked == self._num_graded:
            _log.warning(
                "step %d: none of the %d responses has </think> or ###Response, so that deepscaler gives 0 to all; use "
                "rm_type math for a policy that does not think first",
                commit.batch.step,
                self._num_graded,
            )
