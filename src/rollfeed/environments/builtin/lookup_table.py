"""``core/lookup_table``: a value found in a table, or at the end of a path through it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

from rollfeed.environments.builtin.styled import Drawn, StyledNumber
from rollfeed.environments.builtin.words import WORDS

_LEVELS_A_HOP = 6


class LookupTable(StyledNumber):
    """Find a word's number over ``level // 6`` other words, among ``2 + level % 6 + 2 * (level // 6)`` such paths."""

    environment_id: str = "core/lookup_table"
    version: int = 1
    summary: str = "find a word's number in a table; levels add rows, then words between the word and its number"
    max_level: int | None = 23

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one of the numbers that are there."""
        return 0.0, 1 / _num_paths(level)

    def _draw(self, level: int, random: Random) -> Drawn:
        num_paths, num_hops = _num_paths(level), 1 + level // _LEVELS_A_HOP
        words = random.sample(WORDS, num_paths * num_hops)
        answer, *others = random.sample(range(10, 100), num_paths)
        rows: list[tuple[str, str]] = []
        for path, number in enumerate([answer, *others]):
            on_path = words[path * num_hops : (path + 1) * num_hops]
            rows += zip(on_path, [*on_path[1:], str(number)], strict=True)
        random.shuffle(rows)
        table = "\n".join(f"{key} = {value}" for key, value in rows)
        how = "the number" if num_hops == 1 else "the number, from word to word,"
        compact = ";".join(f"{key}:{value}" for key, value in rows) + f";{words[0]}="
        params = {"answer": answer, "others": others}
        return Drawn(f"{table}\nWhat is {how} of {words[0]}?", compact, params, str(answer))

    def _partial(self, params: Mapping[str, Any], claimed: Fraction) -> float:
        return 0.2 if claimed in params["others"] else 0.0


def _num_paths(level: int) -> int:
    return 2 + level % _LEVELS_A_HOP + 2 * (level // _LEVELS_A_HOP)
