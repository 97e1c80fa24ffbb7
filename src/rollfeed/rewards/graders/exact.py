"""Grader ``exact``: the answer equals the label as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.answers import clean, find_answer, normalize
from rollfeed.rewards.labels import accepted_labels, undecidable
from rollfeed.types import Correct, Verdict


def grade_exact(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the answer equals the label, or one of a list of labels; 0 otherwise.

    Compared are NFKC texts without regard to case, runs of white space, surrounding quotes or markdown
    and a final full stop. A response without an answer gets 0 and ``format_ok`` False. A label that is not text, a
    number or a list of these is an ERROR.
    """
    labels = accepted_labels(label)
    if labels is None:
        return undecidable("exact", label, "a text, a number or a list of them")
    answer = find_answer(response)
    if answer is None:
        return Verdict(reward=0.0, correct=Correct.NO, format_ok=False, detail="no answer found")
    right = _key(answer.text) in {_key(text) for text in labels}
    return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO, extracted=clean(answer.text))


def _key(text: str) -> str:
    return clean(normalize(text)).casefold()
