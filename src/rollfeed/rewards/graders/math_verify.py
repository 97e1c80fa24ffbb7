"""Grader ``math_verify``: the answer, boxed or not, equals the label mathematically."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollfeed.answers import Mark, clean, find_answer
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import undecidable
from rollfeed.rewards.mathematics import grade_equality, math_labels, no_answer, one_or_zero
from rollfeed.types import Verdict

_FORMULA = re.compile(r"\$\$?([^$]{1,2000})\$\$?|\\\(([^$]{1,2000}?)\\\)|\\\[([^$]{1,2000}?)\\\]")
_MAX_LINE_CHARS = 2_000
_SENTENCE_END = re.compile(r"[.!?;](?=\s)|,?\s(?:because|since|as|which|where|rather than|(?:and |but )?not)\b")
_PROSE = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}")
_CLAIM = re.compile(r"\b(?:is|are|equals|equal to|gives|get|be)\b|[:=]")
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:[0-9]+\s[0-9]+/[0-9]+|[0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?%?)(?![\w])"
)


def grade_math_verify(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the answer equals the label, or one of a list of labels; else 0.

    The answer is the last ``\boxed{...}``, ``<answer>`` or "Answer:" line after the reasoning, else the last
    formula of the last line, else its last number.
    """
    labels = math_labels(label)
    if labels is None:
        return undecidable("math_verify", label, "a text, a number or a list of them")
    answer = find_answer(response)
    if answer is None:
        return no_answer("no answer found")
    text = answer.text if answer.mark in (Mark.BOXED, Mark.TAG) else _claimed(answer.text, is_marked=answer.marked)
    return grade_equality(text, labels, verdict=one_or_zero) if text.strip() else no_answer("no answer found")


def _claimed(line: str, *, is_marked: bool) -> str:
    """Return the part of a line that is the answer itself."""
    line = line[-_MAX_LINE_CHARS:].rpartition("####")[2]
    sentence = _SENTENCE_END.split(line.strip(), maxsplit=1)[0] if is_marked else line
    found = (next(part for part in match.groups() if part is not None) for match in _FORMULA.finditer(sentence))
    formulas = [part for part in found if "\\" in part or not _PROSE.search(part)]  # between two prices is prose
    if len(formulas) == 1 or (formulas and not is_marked):
        return formulas[-1]
    if formulas:
        return sentence
    if is_marked:
        return clean(sentence)
    *_, start = [0, *(match.end() for match in _CLAIM.finditer(sentence))]
    numbers = _NUMBER.findall(sentence)
    rest = clean(sentence[start:])
    return rest if len(rest.split()) <= 2 or not numbers else numbers[-1]
