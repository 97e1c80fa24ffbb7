"""Grader ``math``: the boxed answer equals the label mathematically."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.answers import final_text, find_box
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import undecidable
from rollfeed.rewards.mathematics import grade_equality, math_labels, no_answer, one_or_zero
from rollfeed.types import Verdict


def grade_math(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the last ``\boxed{...}`` after the reasoning equals the label, or one of a list; else 0."""
    labels = math_labels(label)
    if labels is None:
        return undecidable("math", label, "a text, a number or a list of them")
    box = find_box(final_text(response))
    if box is None or not box.strip():
        return no_answer("no boxed answer")
    return grade_equality(box, labels, verdict=one_or_zero)
