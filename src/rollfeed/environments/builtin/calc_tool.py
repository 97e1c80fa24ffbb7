"""``core/calc_tool``: arithmetic with a calculator, a turn a call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from rollfeed.answers import after_reasoning, find_claimed_number, without_end_token
from rollfeed.environments.builtin.arithmetic import combine, evaluate, plain
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Verdict

_INSTRUCTION = (
    "You have a calculator: write calc: and an expression, nothing else, and I say its value. "
    "When you know the result, answer with a number."
)
_CALL = re.compile(r"\s*calc:(.*)", re.IGNORECASE | re.DOTALL)


class CalcTool:
    """Work out an expression of ``2 + level // 2`` numbers of ``2 + level // 5`` digits.

    A turn that begins with ``calc:`` is a call, and there are one more than numbers; any other turn is the answer.
    """

    environment_id: str = "core/calc_tool"
    version: int = 1
    summary: str = "work out an expression, with a calculator that takes a turn a call; levels lengthen the expression"
    max_level: int | None = 20

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the share of the commonest value, at most."""
        return 0.0, 0.02

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw an expression."""
        digits = 2 + level // 5
        numbers = [random.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2 + level // 2)]
        expression = combine(numbers, random, largest=100**digits)
        params = {"expression": expression, "max_calls": len(numbers) + 1}
        return f"What is {expression}?\n{_INSTRUCTION}", params, str(evaluate(expression)[0])

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Grade a response as the answer; a wrong one is worth a little after calls, and less without."""
        claimed = None if _call(response) else find_claimed_number(response.rpartition(_INSTRUCTION)[2])
        if claimed is None:
            return no_answer("number")
        num_calls = params.get("num_calls", 0)
        is_right = claimed == evaluate(params["expression"])[0]
        return graded(str(claimed), is_right=is_right, partial=0.3 if num_calls else 0.1, detail=f"{num_calls} calls")

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the problem, with the number of calls so far."""
        return {**params, "num_calls": 0}

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        """Say the value of an expression, or grade the answer."""
        call = _call(response)
        if call is None or state["num_calls"] == state["max_calls"]:
            return EnvironmentStep(verdict=self.verify(state, response))
        try:
            told = f"= {evaluate(plain(call[1]).strip())[0]}"
        except ValueError as error:
            told = f"The calculator says: {error}."
        state = {**state, "num_calls": state["num_calls"] + 1}
        return EnvironmentStep(state=state, messages=({"role": "user", "content": told},))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return no_answer("number")


def _call(response: str) -> re.Match[str] | None:
    return _CALL.fullmatch(after_reasoning(without_end_token(response)))
