"""Labels as graders take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rollfeed.types import Outcome, Verdict

LabelProblem: TypeAlias = Callable[[Any, Mapping[str, Any]], str | None]
"""Why a grader can grade no response by a label and metadata, or None: known beforehand, without a response."""
NO_LABEL = "has no label"
"""The problem of a label that is None, where one is needed."""
TEXTS = "a text, a number or a list of them"


def accepted_labels(label: Any) -> list[str] | None:
    """Return the texts any of which is right, or None for a label that is no text, number or list of these."""
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in labels):
        return None
    texts = [str(one) for one in labels]
    return texts if all(text.strip() for text in texts) else None


def text_problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Fits :data:`LabelProblem`, for graders that compare texts."""
    return None if accepted_labels(label) is not None else unusable(label, TEXTS)


def unusable(label: Any, wanted: str) -> str:
    """Return what is wrong with a label that a grader cannot compare with."""
    return NO_LABEL if label is None else f"the label is {label!r:.80}; it must be {wanted}"


def undecidable(rm_type: str, label: Any, wanted: str) -> Verdict:
    """Return the ERROR verdict for a label that the grader cannot compare with."""
    return Verdict(
        reward=None, outcome=Outcome.ERROR, detail=f"rm_type {rm_type}: the label is {label!r:.80}; it must be {wanted}"
    )
