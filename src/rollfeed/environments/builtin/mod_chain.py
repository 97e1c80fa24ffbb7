"""``core/mod_chain``: the remainder of a chain of sums and products."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

from rollfeed.environments.builtin.styled import Drawn, StyledNumber

_MODULI = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)


class ModChain(StyledNumber):
    """Work out ``1 + level`` steps, from left to right, modulo a prime: the one of number ``level // 2`` from 7 on."""

    environment_id: str = "core/mod_chain"
    version: int = 1
    summary: str = "work out a chain of sums and products modulo a prime; levels add steps and enlarge the prime"
    max_level: int | None = 30

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one remainder."""
        return 0.0, 1 / _MODULI[level // 2]

    def _draw(self, level: int, random: Random) -> Drawn:
        modulus = _MODULI[level // 2]
        start = value = random.randrange(modulus)
        told, compact = f"Start with {start}", f"mod{modulus}:{start}"
        for _ in range(1 + level):
            sign, number = random.choice("+*"), random.randint(2, modulus - 1)
            value = (value + number if sign == "+" else value * number) % modulus
            told += f", {'add' if sign == '+' else 'multiply by'} {number}"
            compact += f"{sign}{number}"
        question = f"{told}. What is the remainder when the result is divided by {modulus}?"
        return Drawn(question, f"{compact}=", {"answer": value, "modulus": modulus}, str(value))

    def _partial(self, params: Mapping[str, Any], claimed: Fraction) -> float:
        return 0.2 if claimed.denominator == 1 and 0 <= claimed < params["modulus"] else 0.0
