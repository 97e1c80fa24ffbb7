"""Answers that are handed to sympy, which hands them to ``eval``."""

from __future__ import annotations

import re

_MAX_CHARS = 10_000
_CHARS = re.compile(r"[0-9A-Za-z+\-*/^().,=\s]*")
_NAME = re.compile(r"[A-Za-z][0-9A-Za-z]*")
_VARIABLE = re.compile(r"[A-Za-z][0-9]*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")
_FUNCTIONS = frozenset(
    "abs Abs sqrt cbrt exp log ln pi sin cos tan cot sec csc sinh cosh tanh asin acos atan".split()  # noqa: SIM905 - short
)


def is_formula(text: str) -> bool:
    """Whether a text has nothing in it but numbers, variables of one letter, operators and well-known functions.

    Anything else is no answer to a question about formulas, and may be a program: sympy evaluates its text as Python,
    with the functions of Python itself.
    """
    if len(text) > _MAX_CHARS or _CHARS.fullmatch(text) is None or _ATTRIBUTE.search(text):
        return False
    return all(name in _FUNCTIONS or _VARIABLE.fullmatch(name) for name in _NAME.findall(text))
