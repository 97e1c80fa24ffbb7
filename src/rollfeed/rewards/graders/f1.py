"""Grader ``f1``: the words that response and label have in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollfeed.answers import final_text, normalize
from rollfeed.rewards.labels import accepted_labels, undecidable
from rollfeed.types import Correct, Verdict

_ARTICLES = frozenset(["a", "an", "the"])
_PUNCTUATION = re.compile(r"[^\w\s]|_")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s?\{([^{}]*)\}")
_DASH_BETWEEN_WORDS = re.compile(r"(?<=\w)[-/](?=\w)")
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_EXACT = frozenset(["yes", "no", "noanswer"])


def grade_f1(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give the F1 of the words after the reasoning against the label, at best over a list of labels.

    Case, punctuation and articles do not count, unless nothing else is left. Where one side is "yes", "no" or
    "noanswer" only the same counts.
    """
    labels = accepted_labels(label)
    if labels is None:
        return undecidable("f1", label, "a text, a number or a list of them")
    words = _words(final_text(response))
    score = max(_f1(words, _words(normalize(text))) for text in labels)
    return Verdict(
        reward=score,
        correct=Correct.YES if score == 1.0 else Correct.NO,
        format_ok=bool(words),
        extracted=" ".join(words)[:500] or None,
    )


def _words(text: str) -> list[str]:
    text = _WRAPPER.sub(r"\1", text).lower()
    text = _BETWEEN_DIGITS.sub("", _DASH_BETWEEN_WORDS.sub(" ", text))
    words = _PUNCTUATION.sub(lambda sign: sign[0] if _is_kept(sign) else "", text).split()
    return [word for word in words if word not in _ARTICLES] or words


def _is_kept(sign: re.Match[str]) -> bool:
    """Whether a sign belongs to a number: 3.5, -2."""
    before, after = sign.string[: sign.start()][-1:], sign.string[sign.end() :][:1]
    if not after.isdigit():
        return False
    return before.isdigit() if sign[0] == "." else sign[0] == "-" and not before.isalnum()


def _f1(words: list[str], wanted: list[str]) -> float:
    if _EXACT & {" ".join(words), " ".join(wanted)}:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
