"""Graders of mathematical answers: ``math``, ``math_verify``, ``deepscaler`` and ``dapo``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollfeed.answers import MAX_CHARS, Mark, clean, final_text, find_answer, find_box, normalize
from rollfeed.rewards.equality import Equality, compare
from rollfeed.rewards.isolation import IsolatedCall
from rollfeed.rewards.labels import TEXTS, LabelError, unusable
from rollfeed.rewards.results import REWARD_KEY
from rollfeed.types import Correct, Verdict

EQUALS_ANY = "rollfeed.rewards.equality.numeric.equals_any"
NO_MARKER = "no </think> and no ###Response in the response"
"""``detail`` of a verdict of ``deepscaler`` that is 0 because nothing says where the answer begins."""
TAIL_CHARS = 300
STRICT_TAIL_CHARS = 100
_MAX_EXTRACTED_CHARS = 500
_MAX_LABELS = 50
_MAX_LINE_CHARS = 2_000
_FORMULA = re.compile(r"\$\$?([^$]{1,2000})\$\$?|\\\(([^$]{1,2000}?)\\\)|\\\[([^$]{1,2000}?)\\\]")
_SENTENCE_END = re.compile(r"[.!?;](?=\s)|,?\s(?:because|since|as|which|where|rather than|(?:and |but )?not)\b")
_PROSE = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,} [A-Za-z]{2,}")
_CLAIM = re.compile(r"\b(?:is|are|equals|equal to|gives|get|be)\b|[:=]")
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:[0-9]+\s[0-9]+/[0-9]+|[0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?%?)(?![\w])"
)
_ANSWER_LINE = re.compile(r"answer[ \t]*:\s*", re.IGNORECASE)


def label_formulas(label: Any, metadata: Mapping[str, Any]) -> list[str]:
    r"""Return the answers any of which is right.

    Of a text with ``\boxed{...}`` the box counts, with "####" what follows. An empty text stays one, which
    nothing equals.

    Raises:
        LabelError: If the label is no text, finite number or list of a few of these.
    """
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels or len(labels) > _MAX_LABELS or not all(map(_is_label, labels)):
        raise unusable(label, TEXTS)
    return [_label_text(str(one)) for one in labels]


def possible_formulas(label: Any, metadata: Mapping[str, Any]) -> list[str]:
    """Return the answers any of which is right. Raises LabelError if there is none that an answer may equal."""
    labels = label_formulas(label, metadata)
    if not any(labels):
        raise LabelError(f"the label is {label!r:.80}, which no answer equals; give it a content")
    return labels


def compare_box(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the last ``\boxed{...}`` after the reasoning equals a label, else 0 (``math``)."""
    return _compare_box(final_text(response), labels)


def compare_deepscaler(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the last ``\boxed{...}`` of the answer part equals a label, else 0 (``deepscaler``).

    The answer part is what follows the last ``</think>``, else the first ``###Response``; else there is none.
    """
    _, marker, part = response.rpartition("</think>") if "</think>" in response else response.partition("###Response")
    return _compare_box(normalize(part[-MAX_CHARS:]), labels) if marker else _no_answer(NO_MARKER)


def compare_answer(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the answer, boxed or not, equals a label, else 0 (``math_verify``).

    The answer is the last ``\boxed{...}``, ``<answer>`` or "Answer:" line after the reasoning, else the last
    formula of the last line, else its last number.
    """
    answer = find_answer(response)
    text = ""
    if answer is not None:
        is_whole = answer.mark in (Mark.BOXED, Mark.TAG)
        text = answer.text if is_whole else _claimed(answer.text, is_marked=answer.marked)
    return grade_equality(text, labels) if text.strip() else _no_answer("no answer found")


def compare_dapo(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    """Give 1 when the last "Answer:" line of the last 300 characters equals a label, else -1 (``dapo``).

    With ``strict_box`` true in the metadata it is ``boxed_dapo``. Where a ``reward_key`` is in force, that number is
    ``score``, beside ``acc``, 1 or 0. What others call ``pred`` is the verdict's extracted answer.
    """
    if metadata.get("strict_box") is True:
        return compare_boxed_dapo(response, labels, metadata)
    *before, rest = _ANSWER_LINE.split(normalize(response[-TAIL_CHARS:]))
    answer = rest.partition("\n")[0].strip().strip("*").strip() if before else ""
    if not answer:
        return _as_dapo(metadata, _no_answer(f'no "Answer:" line in the last {TAIL_CHARS} characters'))
    return grade_equality(find_box(answer) or answer, labels, change=partial(_as_dapo, metadata))


def compare_boxed_dapo(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict | IsolatedCall:
    r"""Give 1 when the last ``\boxed{...}`` that ends in the last 100 characters equals a label; else -1."""
    text = normalize(response[-TAIL_CHARS:])
    box = find_box(text)
    if box is None or not box.strip() or text.rfind(box) + len(box) < len(text) - STRICT_TAIL_CHARS:
        return _as_dapo(metadata, _no_answer(f"no boxed answer in the last {STRICT_TAIL_CHARS} characters"))
    return grade_equality(box, labels, change=partial(_as_dapo, metadata))


def grade_equality(
    answer: str, labels: Sequence[str], *, change: Callable[[Verdict], Verdict] = lambda verdict: verdict
) -> Verdict | IsolatedCall:
    """Compare an answer with each label; what exact means do not decide becomes an isolated call.

    Any of the labels is right; ``change`` is made of the verdict of 1 or 0.
    """

    def verdict(right: Any) -> Verdict:
        reason = right if isinstance(right, str) else ""
        return change(Verdict.graded(right is True, extracted=clean(answer)[:_MAX_EXTRACTED_CHARS], detail=reason))

    undecided = []
    for label in labels:
        match compare(answer, label):
            case Equality.EQUAL:
                return verdict(True)
            case Equality.UNDECIDED:
                undecided.append(label)
    return IsolatedCall(EQUALS_ANY, (answer, undecided), verdict) if undecided else verdict(False)


def _compare_box(text: str, labels: Sequence[str]) -> Verdict | IsolatedCall:
    box = find_box(text)
    return grade_equality(box, labels) if box is not None and box.strip() else _no_answer("no boxed answer")


def _no_answer(detail: str) -> Verdict:
    return Verdict.graded(False, format_ok=False, detail=detail)


def _as_dapo(metadata: Mapping[str, Any], verdict: Verdict) -> Verdict:
    score, accuracy = (1.0, 1.0) if verdict.correct is Correct.YES else (-1.0, 0.0)
    return replace(verdict, reward=score if metadata.get(REWARD_KEY) is None else {"score": score, "acc": accuracy})


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


def _is_label(label: Any) -> bool:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return False
    return not isinstance(label, float) or math.isfinite(label)


def _label_text(text: str) -> str:
    box = find_box(text)
    return normalize(box if box is not None else text.rpartition("####")[2]).strip()
