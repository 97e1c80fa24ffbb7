"""Verdicts of environments: shaped rewards that only a right answer brings to 1."""

from __future__ import annotations

from rollfeed.types import Correct, Verdict

MAX_PARTIAL_REWARD = 0.9
"""A wrong answer gets at most this."""


def graded(extracted: str, *, is_right: bool, partial: float, detail: str = "") -> Verdict:
    """Return reward 1 for a right answer, else ``partial`` of what a wrong one can get."""
    return Verdict(
        reward=1.0 if is_right else MAX_PARTIAL_REWARD * partial,
        correct=Correct.YES if is_right else Correct.NO,
        extracted=extracted[:200],
        detail=detail,
    )


def no_answer(wanted: str) -> Verdict:
    """Return the verdict of a response in which no answer was found."""
    return Verdict(reward=0.0, correct=Correct.NO, format_ok=False, detail=f"no {wanted} found as the answer")
