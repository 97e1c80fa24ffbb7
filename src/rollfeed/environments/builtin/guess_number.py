"""``core/guess_number``: a number is guessed in several turns, each answered with higher or lower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

from rollfeed.answers import find_claimed_number
from rollfeed.environments.builtin.scoring import graded, no_answer
from rollfeed.environments.builtin.styled import Styled
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Correct, Verdict

_SMALLEST_RANGE = 4


class GuessNumber(Styled):
    """A number from 1 on; a level more doubles the range and gives one guess more.

    Halving always finds it. An episode is worth 1 for a first guess that is right, less for each other guess, and
    nothing where the number is not found.

    The compact style is ``1-8?``, answered with ``>`` and ``<``.
    """

    environment_id: str = "core/guess_number"
    version: int = 1
    summary: str = "guess a number in several turns; levels double the range"
    max_level: int | None = 20

    def for_split(self, split: str) -> GuessNumber:
        """Return the environment itself: no number is held out.

        All problems ask the same, so that there is nothing to remember, and a number that never comes in training is
        one that the policy learns not to guess.
        """
        return self

    def guess_rate(self, level: int) -> tuple[float, float]:
        """Return the chance of one guess, and of all guesses of an episode that heed no answer."""
        return 1 / (_SMALLEST_RANGE << level), (level + 3) / (_SMALLEST_RANGE << level)

    def make(self, level: int, random: Random) -> tuple[str, dict[str, Any], str | None]:
        """Draw a number from 1 to ``4 * 2 ** level``, to be guessed in ``level + 3`` turns."""
        highest = _SMALLEST_RANGE << level
        params = {"number": random.randint(1, highest), "max_turns": level + 3, "style": self._style}
        question = f"1-{highest}?"
        if self._style == "chat":
            question = (
                f"I think of a whole number from 1 to {highest}. Guess it in at most {params['max_turns']} turns: "
                "answer with a number, and I say whether mine is higher or lower."
            )
        return question, params, str(params["number"])

    def verify(self, params: Mapping[str, Any], response: str) -> Verdict:
        """Grade a response as a first guess."""
        return _graded(params, find_claimed_number(response))

    def start(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the problem, with the number of guesses so far."""
        return {**params, "num_guesses": 0}

    def step(self, state: Mapping[str, Any], response: str) -> EnvironmentStep:
        """Say whether the number is higher or lower than the one that was guessed."""
        state = {**state, "num_guesses": state["num_guesses"] + 1}
        guess = find_claimed_number(response)
        verdict = _graded(state, guess)
        if verdict.correct is Correct.YES:
            others = (state["num_guesses"] - 1) / state["max_turns"]
            return EnvironmentStep(verdict=replace(verdict, reward=1.0 - others))
        if state["num_guesses"] == state["max_turns"]:
            return EnvironmentStep(verdict=self.give_up(state))
        words = (">", "<", "?") if state["style"] == "compact" else ("Higher.", "Lower.", "Answer with a number.")
        told = words[2] if guess is None else words[0] if guess < state["number"] else words[1]
        return EnvironmentStep(state=state, messages=({"role": "user", "content": told},))

    def give_up(self, state: Mapping[str, Any]) -> Verdict:
        return Verdict(reward=0.0, correct=Correct.NO, detail=f"{state['number']} was not guessed")


def _graded(params: Mapping[str, Any], guess: Fraction | None) -> Verdict:
    if guess is None:
        return no_answer("number")
    return graded(str(guess), is_right=guess == params["number"], partial=0.0)
