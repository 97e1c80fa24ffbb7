"""``core/sort_numbers``: numbers in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import factorial
from random import Random
from typing import Any

from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.styled import Drawn, StyledQuestion
from rollfeed.types import Verdict

_INTEGER, _COMPACT = re.compile(r"[0-9]{1,40}"), re.compile(r"[0-9,]+")


class SortNumbers(StyledQuestion):
    """Put ``2 + level // 2`` different numbers of ``1 + level // 3`` digits into ascending order."""

    environment_id: str = "core/sort_numbers"
    version: int = 1
    summary: str = "sort numbers; levels add numbers and digits"
    max_level: int | None = 24
    instruction: str = "Answer with the sorted numbers, separated by commas."

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance that the numbers come in order, and are repeated."""
        return 0.0, 1 / factorial(2 + level // 2)

    def _draw(self, level: int, random: Random) -> Drawn:
        digits = 1 + level // 3
        numbers = random.sample(range(10 ** (digits - 1), 10**digits), 2 + level // 2)
        listed, answer = (", ".join(map(str, each)) for each in (numbers, sorted(numbers)))
        question = f"Sort these numbers from smallest to largest: {listed}."
        return Drawn(question, f"sort:{listed.replace(' ', '')}=", {"numbers": numbers}, answer)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare with the numbers in order; a wrong answer is worth the share in place, half where it changes them."""
        expected = sorted(int(number) for number in params["numbers"])
        text = self._written(params, response)
        written = [int(found) for found in _INTEGER.findall(text)]
        if not written or (params["style"] == "compact" and not _COMPACT.fullmatch(text)):
            return no_answer("number")
        in_place = sum(ours == theirs for ours, theirs in zip(written, expected, strict=False))
        partial = in_place / max(len(written), len(expected)) / (1 if Counter(written) == Counter(expected) else 2)
        return graded(", ".join(map(str, written)), is_right=written == expected, partial=partial)
