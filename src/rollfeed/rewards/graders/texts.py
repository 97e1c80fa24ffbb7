"""Graders of texts: ``exact``, ``number``, ``f1`` and ``bbeh``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rollfeed.answers import Mark, clean, final_text, find_answer, find_box, find_numbers, find_tag, normalize
from rollfeed.rewards.labels import LabelError, label_texts, unusable
from rollfeed.rewards.results import REWARD_KEY
from rollfeed.types import Verdict

BBEH_KEYS = ("reward", "accuracy", "format_score")
"""What ``reward_key`` may choose of ``bbeh``, by the names of ``rlve``."""

_FORMAT_SHARE = 0.1
_MAX_EXTRACTED_CHARS = 500
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s?\{([^{}]*)\}")

_ARTICLES = frozenset(["a", "an", "the"])
_PUNCTUATION = re.compile(r"[^\w\s]|_")
_DASH_BETWEEN_WORDS = re.compile(r"(?<=\w)[-/](?=\w)")
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_ALONE = frozenset(["yes", "no", "noanswer"])

_PREFIX = re.compile(r"\bthe (?:final )?answer(?: to the question)?(?: is\s*:?|\s*:)\s*", re.IGNORECASE)
_OPTION = re.compile(r"\(([a-z0-9])\)")
_BRACKETS = {"[": "]", "(": ")", "{": "}"}


def compare_exactly(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the answer equals a label, else 0 (``exact``).

    Compared are NFKC texts without regard to case, runs of white space, surrounding quotes or markdown
    and a final full stop. A response without an answer gets 0 and ``format_ok`` False.
    """
    answer = find_answer(response)
    if answer is None:
        return Verdict.graded(False, format_ok=False, detail="no answer found")
    return Verdict.graded(text_key(answer.text) in set(map(text_key, labels)), extracted=clean(answer.text))


def text_key(text: str) -> str:
    """Return what texts have in common that are equal to ``exact``."""
    return clean(normalize(text)).casefold()


def compare_number(response: str, wanted: Sequence[Fraction], metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when the last number of the answer equals a label, else 0 (``number``).

    Integers, decimals, thousands separators and fractions are compared exactly, never as floats; units and
    currency signs do not matter. A response without a number gets 0 and ``format_ok`` False.
    """
    answer = find_answer(response, fallback=Mark.RAW)
    numbers = find_numbers(answer.text) if answer is not None else []
    if not numbers:
        return Verdict.graded(False, format_ok=False, detail="no number found")
    return Verdict.graded(numbers[-1] in wanted, extracted=str(numbers[-1]))


def label_numbers(label: Any, metadata: Mapping[str, Any]) -> list[Fraction]:
    """Return the numbers any of which is right; of a text with "####" only what follows counts, as in GSM8K.

    Raises:
        LabelError: If the label is not one number, or a list of such.
    """
    wanted = "one number, or a list of numbers"
    try:
        found = [find_numbers(normalize(text.rpartition("####")[2])) for text in label_texts(label, metadata)]
    except LabelError:
        raise unusable(label, wanted) from None
    if any(len(numbers) != 1 for numbers in found):
        raise unusable(label, wanted)
    return [numbers[0] for numbers in found]


def compare_words(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict:
    """Give the F1 of the words after the reasoning against a label, at best over all (``f1``).

    Case, punctuation and articles do not count, unless nothing else is left. Where one side is "yes", "no" or
    "noanswer" only the same counts.
    """
    words = _words(final_text(response))
    score = max(_f1(words, _words(normalize(label))) for label in labels)
    extracted = " ".join(words)[:_MAX_EXTRACTED_CHARS] or None
    return Verdict.graded(score == 1.0, reward=score, format_ok=bool(words), extracted=extracted)


def _words(text: str) -> list[str]:
    text = _WRAPPER.sub(r"\1", text).lower()
    text = _BETWEEN_DIGITS.sub("", _DASH_BETWEEN_WORDS.sub(" ", text))
    words = _PUNCTUATION.sub(lambda sign: sign[0] if _belongs_to_number(sign) else "", text).split()
    return [word for word in words if word not in _ARTICLES] or words


def _belongs_to_number(sign: re.Match[str]) -> bool:
    """Whether a sign is one as in 3.5 or -2."""
    before, after = sign.string[: sign.start()][-1:], sign.string[sign.end() :][:1]
    if not after.isdigit():
        return False
    return before.isdigit() if sign[0] == "." else sign[0] == "-" and not before.isalnum()


def _f1(words: list[str], wanted: list[str]) -> float:
    if _ALONE & {" ".join(words), " ".join(wanted)}:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def compare_leniently(response: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when what follows the last "The answer is" matches a label, else 0 (``bbeh``, BIG-Bench Extra Hard).

    Looked at is the last ``<answer>``, else the last box, else the whole text, which without that prefix is the answer
    itself. Case, outer brackets, quotes, markdown, LaTeX wrappers, a final full stop and spaces after commas do not
    count, numbers are compared by value.

    Where a ``reward_key`` is in force, ``reward`` is also 0.1 for a wrong answer that is marked, as RLVE has it, beside
    ``accuracy`` and ``format_score``.
    """
    whole = final_text(response)
    tagged = find_tag(whole)
    text = whole if tagged is None else tagged
    *_, start = [0, *(match.end() for match in _PREFIX.finditer(text))]
    answer = _plain(text[start:].strip().split("\n")[0] if start else text)
    right = bool(answer) and any(_match(answer, _plain(normalize(label))) for label in labels)
    verdict = Verdict.graded(right, format_ok=bool(answer), extracted=answer[:_MAX_EXTRACTED_CHARS] or None)
    if metadata.get(REWARD_KEY) is None:
        return verdict
    is_marked = bool(answer) and (tagged is not None or find_box(whole) is not None)
    numbers = (1.0 if right else _FORMAT_SHARE * is_marked, float(right), float(is_marked))
    return replace(verdict, reward=dict(zip(BBEH_KEYS, numbers, strict=True)))


def _plain(text: str) -> str:
    box = find_box(text)
    text = text if box is None else box
    text = _WRAPPER.sub(r"\1", text).replace("\\(", "").replace("\\)", "")
    text = clean(text).rstrip(".?!").strip().casefold()
    return re.sub(r"\s*,\s*", ",", text)


def _match(answer: str, label: str) -> bool:
    number = _number(answer)
    return bool(_forms(answer) & _forms(label)) or (number is not None and number == _number(label))


def _forms(text: str) -> set[str]:
    """Return the text with and without what may be left out around it."""
    bare = text
    if len(text) > 2 and _BRACKETS.get(text[0]) == text[-1] and _is_one_bracket(text):
        bare = text[1:-1].strip()
    option = _OPTION.fullmatch(text)
    return {text, bare, bare.replace("'", "").replace('"', "")} | ({option[1]} if option else set())


def _is_one_bracket(text: str) -> bool:
    depth = 0
    for position, char in enumerate(text):
        depth += char == text[0]
        depth -= char == _BRACKETS[text[0]]
        if depth == 0:
            return position == len(text) - 1
    return False


def _number(text: str) -> Fraction | None:
    text = text.strip("$%").strip()
    numbers = find_numbers(text)
    return numbers[0] if len(numbers) == 1 and re.fullmatch(r"[-+]?[0-9.,/e+-]+", text) else None
