"""``core/add_numbers``: the sum of positive integers."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.answers import find_claimed_number
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.types import Verdict


class AddNumbers:
    """Two or more numbers to add; a level more is a digit or a number more."""

    environment_id: str = "core/add_numbers"
    version: int = 1
    summary: str = "add positive integers; levels add digits and terms"
    max_level: int | None = 40

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the share of the commonest sum, at most."""
        return 0.0, 0.12 if level == 0 else 0.02

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw ``2 + level // 5`` terms of ``1 + level // 2`` digits, the first of ``1 + (level + 1) // 2``."""
        digits = [1 + (level + 1) // 2] + [1 + level // 2] * (1 + level // 5)
        terms = [random.randint(10 ** (n - 1), 10**n - 1) for n in digits]
        question = f"What is {' + '.join(map(str, terms))}? Answer with a number."
        return question, {"terms": terms}, str(sum(terms))

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare the claimed number with the sum; a wrong integer is worth the share of last digits it has right."""
        terms = [int(term) for term in params["terms"]]
        claimed = find_claimed_number(response, given=terms)
        if claimed is None:
            return no_answer("number")
        digits_right = _matching_last_digits(str(claimed), str(sum(terms)))
        return graded(str(claimed), is_right=claimed == sum(terms), partial=0.2 + 0.8 * digits_right)


def _matching_last_digits(claimed: str, expected: str) -> float:
    """Return the share of digits that agree, counted from the end up to the first that does not."""
    matching = 0
    for ours, theirs in zip(reversed(claimed), reversed(expected), strict=False):
        if ours != theirs:
            break
        matching += 1
    return matching / max(len(claimed), len(expected))
