"""Grader ``dapo``: the last "Answer:" line within the last 300 characters, +1 or -1.

Where a ``reward_key`` is in force, that number is ``score``, beside ``acc``, 1 or 0. What others call ``pred`` is the
verdict's extracted answer, as rewards are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rollfeed.answers import find_box, normalize
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import undecidable
from rollfeed.rewards.mathematics import grade_equality, math_labels, no_answer
from rollfeed.rewards.results import REWARD_KEY
from rollfeed.types import Correct, Verdict

TAIL_CHARS = 300
STRICT_TAIL_CHARS = 100
_ANSWER = re.compile(r"answer[ \t]*:\s*", re.IGNORECASE)


def grade_dapo(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    """Give 1 when the last "Answer:" line of the last 300 characters equals the label, or one of a list; else -1.

    With ``strict_box`` true in the metadata it is ``boxed_dapo``.
    """
    if metadata.get("strict_box") is True:
        return grade_boxed_dapo(response, label, metadata)
    labels = math_labels(label)
    if labels is None:
        return undecidable("dapo", label, "a text, a number or a list of them")
    *before, rest = _ANSWER.split(normalize(response[-TAIL_CHARS:]))
    answer = rest.partition("\n")[0].strip().strip("*").strip() if before else ""
    if not answer:
        return _keyed(metadata, no_answer(f'no "Answer:" line in the last {TAIL_CHARS} characters', reward=-1.0))
    box = find_box(answer)
    verdict = partial(_plus_or_minus_one, metadata)
    return grade_equality(box or answer if box is not None else answer, labels, verdict=verdict)


def grade_boxed_dapo(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the last ``\boxed{...}`` that ends in the last 100 characters equals the label; else -1."""
    labels = math_labels(label)
    if labels is None:
        return undecidable("boxed_dapo", label, "a text, a number or a list of them")
    text = normalize(response[-TAIL_CHARS:])
    box = find_box(text)
    if box is None or not box.strip() or text.rfind(box) + len(box) < len(text) - STRICT_TAIL_CHARS:
        return _keyed(metadata, no_answer(f"no boxed answer in the last {STRICT_TAIL_CHARS} characters", reward=-1.0))
    return grade_equality(box, labels, verdict=partial(_plus_or_minus_one, metadata))


def _plus_or_minus_one(metadata: Mapping[str, Any], right: bool, extracted: str) -> Verdict:
    correct = Correct.YES if right else Correct.NO
    return _keyed(metadata, Verdict(reward=1.0 if right else -1.0, correct=correct, extracted=extracted))


def _keyed(metadata: Mapping[str, Any], verdict: Verdict) -> Verdict:
    if metadata.get(REWARD_KEY) is None or not isinstance(verdict.reward, float):
        return verdict
    return replace(verdict, reward={"score": verdict.reward, "acc": float(verdict.correct is Correct.YES)})
