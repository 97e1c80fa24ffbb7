"""What the graders of mathematical answers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollfeed.answers import clean, find_box, normalize
from rollfeed.rewards.equality import Equality, compare
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import TEXTS, unusable
from rollfeed.types import Correct, Verdict

EQUALS_ANY = "rollfeed.rewards.equality.numeric.equals_any"
MAX_EXTRACTED_CHARS = 500
_MAX_LABELS = 50


def math_labels(label: Any) -> list[str] | None:
    r"""Return the answers any of which is right, or None for a label that is no text, number or list of these.

    Of a text with ``\boxed{...}`` the box counts, with "####" what follows. An empty text stays one, which
    nothing equals.
    """
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels or len(labels) > _MAX_LABELS or not all(_is_label(one) for one in labels):
        return None
    return [_label_text(str(one)) for one in labels]


def math_problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Fits :data:`rollfeed.rewards.labels.LabelProblem`."""
    labels = math_labels(label)
    if labels is None:
        return unusable(label, TEXTS)
    return None if any(labels) else f"the label is {label!r:.80}, which no answer equals; give it a content"


def grade_equality(
    answer: str, labels: Sequence[str], *, verdict: Callable[[bool, str], Verdict]
) -> Verdict | IsolatedCall:
    """Compare an answer with each label; what exact means do not decide becomes an isolated call.

    Args:
        answer: As extracted.
        labels: Any of which is right.
        verdict: Makes the verdict from whether the answer is right, and the answer.
    """
    extracted = clean(answer)[:MAX_EXTRACTED_CHARS]
    undecided = []
    for label in labels:
        match compare(answer, label):
            case Equality.EQUAL:
                return verdict(True, extracted)
            case Equality.UNDECIDED:
                undecided.append(label)
    if not undecided:
        return verdict(False, extracted)
    return IsolatedCall(EQUALS_ANY, (answer, undecided), lambda right: verdict(right is True, extracted))


def one_or_zero(right: bool, extracted: str) -> Verdict:
    """Return the verdict 1 or 0."""
    return Verdict(reward=float(right), correct=Correct.YES if right else Correct.NO, extracted=extracted)


def no_answer(detail: str, *, reward: float = 0.0) -> Verdict:
    """Return the verdict for a response without an answer."""
    return Verdict(reward=reward, correct=Correct.NO, format_ok=False, detail=detail)


def _is_label(label: Any) -> bool:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return False
    return not isinstance(label, float) or math.isfinite(label)


def _label_text(text: str) -> str:
    box = find_box(text)
    return normalize(box if box is not None else text.rpartition("####")[2]).strip()
