"""Whether a program's output is the expected one.

Text is compared line by line and word by word: blanks and empty lines around do not matter, their absence or
presence inside does. A number may be written in another way; where the expected one has a fraction or an exponent it
may also be off by the tolerance.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6
"""Relative or absolute, whichever allows more; but no more than a tenth of what is expected, where that is not 0."""
_NOISE = 1e-12
"""Smaller numbers are what computing in floats has left of 0."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_MAX_DIGITS = 400


def same_output(output: str, expected: str) -> bool:
    """Return whether what a program printed is what it should have."""
    printed, wanted = _lines(output), _lines(expected)
    return len(printed) == len(wanted) and all(
        len(words) == len(wanted_words) and all(map(_same_word, words, wanted_words))
        for words, wanted_words in zip(printed, wanted, strict=True)
    )


def same_value(value: Any, expected: Any) -> bool:
    """Return whether a function's result, as JSON values, is the expected one."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, float) and isinstance(value, int | float):
        return _close(float(value), expected) if abs(value) < 1e300 else value == expected
    return bool(value == expected) and isinstance(value, str) == isinstance(expected, str)


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.split("\n")]
    filled = [number for number, words in enumerate(lines) if words]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if max(len(word), len(expected)) > _MAX_DIGITS or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if expected.lstrip("+-").isdigit():
        return Decimal(word) == Decimal(expected)
    return _close(float(word), float(expected))


def _close(number: float, expected: float) -> bool:
    return number == expected or (
        math.isfinite(number) and math.isclose(number, expected, rel_tol=TOLERANCE, abs_tol=_absolute(expected))
    )


def _absolute(expected: float) -> float:
    return TOLERANCE if abs(expected) < _NOISE else min(TOLERANCE, abs(expected) / 10)
