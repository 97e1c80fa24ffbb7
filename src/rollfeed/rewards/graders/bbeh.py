"""Grader ``bbeh``: the lenient match of BIG-Bench Extra Hard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollfeed.answers import clean, final_text, find_box, find_numbers, normalize
from rollfeed.rewards.labels import accepted_labels, undecidable
from rollfeed.types import Correct, Verdict

_PREFIX = re.compile(r"\bthe (?:final )?answer(?: to the question)?(?: is\s*:?|\s*:)\s*", re.IGNORECASE)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")
_OPTION = re.compile(r"\(([a-z0-9])\)")
_BRACKETS = {"[": "]", "(": ")", "{": "}"}


def grade_bbeh(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give 1 when what follows the last "The answer is" matches the label, or one of a list; else 0.

    Without that prefix the whole text is the answer. Case, outer brackets, quotes, markdown, LaTeX wrappers, a
    final full stop and spaces after commas do not count, numbers are compared by value.
    """
    labels = accepted_labels(label)
    if labels is None:
        return undecidable("bbeh", label, "a text, a number or a list of them")
    text = final_text(response)
    *_, start = [0, *(match.end() for match in _PREFIX.finditer(text))]
    answer = _plain(text[start:].strip().split("\n")[0] if start else text)
    right = bool(answer) and any(_match(answer, _plain(normalize(text))) for text in labels)
    return Verdict(
        reward=float(right),
        correct=Correct.YES if right else Correct.NO,
        format_ok=bool(answer),
        extracted=answer[:500] or None,
    )


def _plain(text: str) -> str:
    box = find_box(text)
    text = text if box is None else box
    text = _WRAPPER.sub(r"\1", text).replace("\\(", "").replace("\\)", "")
    text = clean(text).rstrip(".?!").strip().casefold()
    return re.sub(r"\s*,\s*", ",", text)


def _match(answer: str, label: str) -> bool:
    forms, wanted = _forms(answer), _forms(label)
    if forms & wanted:
        return True
    number, wanted_number = _number(answer), _number(label)
    return number is not None and number == wanted_number


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
