"""Grader ``number``: the last number of the answer equals the label."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollfeed.answers import Mark, find_answer, find_numbers, normalize
from rollfeed.rewards.labels import accepted_labels, undecidable, unusable
from rollfeed.types import Correct, Verdict

_KIND = "one number, or a list of numbers"


def grade_number(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the last number of the answer equals the label, or one of a list of labels; 0 otherwise.

    Integers, decimals, thousands separators and fractions are compared exactly, never as floats; units and
    currency signs do not matter. Of a label with "####" only what follows counts, as in GSM8K. A response without
    a number gets 0 and ``format_ok`` False; a label that is not one number is an ERROR.
    """
    wanted = _wanted(label)
    if wanted is None:
        return undecidable("number", label, _KIND)
    answer = find_answer(response, fallback=Mark.RAW)
    numbers = find_numbers(answer.text) if answer is not None else []
    if not numbers:
        return Verdict(reward=0.0, correct=Correct.NO, format_ok=False, detail="no number found")
    right = numbers[-1] in wanted
    return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO, extracted=str(numbers[-1]))


def number_problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Fits :data:`rollfeed.rewards.labels.LabelProblem`."""
    return None if _wanted(label) is not None else unusable(label, _KIND)


def _wanted(label: Any) -> list[Fraction] | None:
    found = [_label_number(text) for text in accepted_labels(label) or ()]
    numbers = [number for number in found if number is not None]
    return numbers if numbers and len(numbers) == len(found) else None


def _label_number(text: str) -> Fraction | None:
    numbers = find_numbers(normalize(text.rpartition("####")[2]))
    return numbers[0] if len(numbers) == 1 else None
