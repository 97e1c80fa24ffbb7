"""``core/compare_max``: the largest of several numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

from rollfeed.answers import Mark, find_answer, find_claimed_number, find_numbers
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.types import Verdict

# "42 is the largest", or "the largest number is 42" unless a list follows.
_IS_LARGEST = re.compile(
    r"""
    (?<![0-9,.]) (-?[0-9][0-9,]*) [*"]* \ is\ (?:indeed\ |clearly\ )? (?:an?\ |the\ )? (?:larg|bigg|great|high|max)
    | \b(?:larg|bigg|great|high|max)[a-z]* (?:\ number|\ one)? \ is\ (?:indeed\ |actually\ )? [*"]*
      (-?[0-9][0-9,]*) (?! [0-9] | [ ,]*(?:or|and)?[ ]*[0-9])
    """,
    re.IGNORECASE | re.VERBOSE,
)


class CompareMax:
    """Pick the largest number; a level more is a number more, and now and then a digit."""

    environment_id: str = "core/compare_max"
    version: int = 1
    summary: str = "find the largest of several numbers; levels add numbers and digits"
    max_level: int | None = 30

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one of the numbers."""
        return 0.0, 1 / (2 + level)

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw ``2 + level`` different numbers of ``2 + level // 3`` digits."""
        digits = 2 + level // 3
        numbers = random.sample(range(10 ** (digits - 1), 10**digits), 2 + level)
        listed = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
        question = f"Which number is the {'larger' if level == 0 else 'largest'}: {listed}? Answer with a number."
        return question, {"numbers": numbers}, str(max(numbers))

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare the claimed number with the maximum; another of the list is worth the share of numbers below it.

        A response that names several numbers claims one only where it says which is the largest.
        """
        numbers = [int(number) for number in params["numbers"]]
        claimed = _claimed_maximum(response)
        if claimed is None:
            return no_answer("single number")
        below = sum(number < claimed for number in numbers) if claimed in numbers else 0
        partial = 0.1 + 0.9 * below / len(numbers) if claimed in numbers else 0.0
        return graded(str(claimed), is_right=claimed == max(numbers), partial=partial)


def _claimed_maximum(response: str) -> Fraction | None:
    answer = find_answer(response, fallback=Mark.RAW)
    found = _IS_LARGEST.findall(answer.text) if answer is not None else []
    stated = {number for before, after in found for number in find_numbers(before or after)}
    if stated:
        return stated.pop() if len(stated) == 1 else None
    return find_claimed_number(response)
