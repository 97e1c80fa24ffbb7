"""Grader ``deepscaler``: as ``math``, for models that think first; without the end of thinking the answer is 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.answers import MAX_CHARS, find_box, normalize
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import undecidable
from rollfeed.rewards.mathematics import grade_equality, math_labels, no_answer, one_or_zero
from rollfeed.types import Verdict

_THINK_END = "</think>"
_RESPONSE = "###Response"
NO_MARKER = "no </think> and no ###Response in the response"
"""``detail`` of a verdict that is 0 because nothing says where the answer begins."""


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
        return no_answer(NO_MARKER)
    box = find_box(normalize(text[-MAX_CHARS:]))
    if box is None or not box.strip():
        return no_answer("no boxed answer")
    return grade_equality(box, labels, verdict=one_or_zero)


def _answer_part(response: str) -> str | None:
    if _THINK_END in response:
        return response.rpartition(_THINK_END)[2]
    _, marker, after = response.partition(_RESPONSE)
    return after if marker else None
