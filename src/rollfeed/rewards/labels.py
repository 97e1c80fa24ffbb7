"""Labels as graders compare with them: read from a prompt's label and metadata, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

LabelProblem: TypeAlias = Callable[[Any, Mapping[str, Any]], str | None]
"""Why a grader can grade no response by a label and metadata, or None: known beforehand, without a response."""
NO_LABEL = "has no label"
"""The problem of a label that is None, where one is needed."""
TEXTS = "a text, a number or a list of them"


class LabelError(ValueError):
    """A grader can grade no response by a label and metadata; the text says why."""

    is_missing = False
    """Whether there is no label at all."""


def unusable(label: Any, wanted: str) -> LabelError:
    """Return the error of a label that is of another kind than ``wanted``."""
    error = LabelError(f"the label is {label!r:.80}; it must be {wanted}")
    error.is_missing = label is None
    return error


def label_texts(label: Any, metadata: Mapping[str, Any]) -> list[str]:
    """Return the texts any of which is right. Raises LabelError if the label is no text, number or list of these."""
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in labels):
        raise unusable(label, TEXTS)
    texts = [str(one) for one in labels]
    if not all(text.strip() for text in texts):
        raise unusable(label, TEXTS)
    return texts
