"""``core/count_symbol``: how often a letter occurs in a list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

from rollfeed.answers import find_answer, find_claimed_number
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.types import Verdict

_LETTERS = "bcdfghkmpst"  # no vowels: "a" and "i" are words
_COUNTING = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_NUMBER_WORDS: Mapping[str, int] = {
    **{word: number for number, word in enumerate(_COUNTING.split())},
    **{"once": 1, "twice": 2, "thrice": 3},
}


class CountSymbol:
    """Count a letter; a level more is a longer list, and now and then another letter."""

    environment_id: str = "core/count_symbol"
    version: int = 1
    summary: str = "count how often a letter occurs in a list; levels make the list longer"
    max_level: int | None = 40

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of any one count."""
        return 0.0, 1 / (3 + 2 * level)

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw ``4 + 2 * level`` letters of ``2 + level // 2`` kinds, the one asked for at least once."""
        length, kinds = 4 + 2 * level, min(2 + level // 2, len(_LETTERS))
        symbol, *others = random.sample(_LETTERS, kinds)
        count = random.randint(1, length - 1)
        letters = [symbol] * count + random.choices(others, k=length - count)
        random.shuffle(letters)
        question = (
            f"How many times does the letter {symbol} appear in this list: {' '.join(letters)}? Answer with a number."
        )
        return question, {"letters": "".join(letters), "symbol": symbol}, str(count)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Compare the claimed number, in digits or as a word, with the count; a wrong one is worth less further off."""
        expected = params["letters"].count(params["symbol"])
        claimed = find_claimed_number(response)
        claimed = _claimed_in_words(response) if claimed is None else claimed
        if claimed is None:
            return no_answer("number")
        return graded(str(claimed), is_right=claimed == expected, partial=float(1 / (1 + abs(claimed - expected))))


def _claimed_in_words(response: str) -> Fraction | None:
    """Return the only number word of the answer's line, unless the line has digits as well."""
    answer = find_answer(response)
    if answer is None or re.search("[0-9]", answer.text):
        return None
    named = {_NUMBER_WORDS[word] for word in re.findall(r"\w+", answer.text.casefold()) if word in _NUMBER_WORDS}
    return Fraction(named.pop()) if len(named) == 1 else None
