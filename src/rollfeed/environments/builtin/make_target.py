"""``core/make_target``: an expression of given numbers that has a given value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.environments.builtin.arithmetic import combine, evaluate, plain
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.styled import Drawn, StyledQuestion
from rollfeed.types import Verdict

_RUN = re.compile(r"[0-9+\-*/() ]+")


class MakeTarget(StyledQuestion):
    """Reach a number with ``2 + level // 2`` others of up to ``9 + 2 * level``; from level 4 on one may divide."""

    environment_id: str = "core/make_target"
    version: int = 1
    summary: str = "make a number of others with + - * /; levels add numbers, and enlarge them"
    max_level: int | None = 12
    instruction: str = "Use each number once, with + - * / and brackets. Answer with the expression."

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of one way to join the numbers, such as their sum."""
        return 0.0, 0.4 / (1 + level // 2)

    def _draw(self, level: int, random: Random) -> Drawn:
        numbers = [random.randint(1, 9 + 2 * level) for _ in range(2 + level // 2)]
        answer = combine(numbers, random, signs="+-*" if level < 4 else "+-*/")
        params = {"numbers": numbers, "target": int(evaluate(answer)[0])}
        compact = f"make:{params['target']}:{','.join(map(str, numbers))}="
        return Drawn(f"Make {params['target']} out of {', '.join(map(str, numbers))}.", compact, params, answer)

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Work the expression out; a wrong one is worth more with the right numbers, and more the nearer its value is.

        Any expression will do. An answer may go on with ``=``; of several expressions the last counts.
        """
        written = _last_expression(plain(self._written(params, response)))
        if not written:
            return no_answer("expression")
        try:
            value, used = evaluate(written)
        except ValueError as error:
            return graded(written, is_right=False, partial=0.0, detail=str(error))
        if Counter(used) != Counter(params["numbers"]):
            return graded(written, is_right=False, partial=0.1, detail="not each number once")
        distance = abs(value - params["target"])
        return graded(written, is_right=not distance, partial=0.2 + 0.6 * float(1 / (1 + distance)))


def _last_expression(text: str) -> str:
    """Return the last expression in a text, a number alone being none; empty where there is none."""
    # Not by one pattern with both ends: it would go back over a long row of signs from each of them.
    runs = (run.lstrip("+*/) ").rstrip("+-*/( ") for run in reversed(_RUN.findall(text)))
    return next((run for run in runs if run and not run.isdigit()), "")
