"""An agent's task in several turns: the model guesses a number, and is told whether it is higher or lower."""

import re

from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Verdict


def guess_in(response):
    """Return the number that a turn begins with, or None."""
    found = re.match(r"\d+", response)
    return int(found[0]) if found else None


class Guess:
    """A number to be found. Each method is pure: it uses what it is handed, and nothing else."""

    environment_id, version, summary, max_level = "mine/guess", 1, "find a number in several turns", 2

    def make(self, level, random):
        """Return the first message, all that the other methods need (JSON values), and a right answer if known."""
        highest = 4 + 5 * level
        number = random.randint(1, highest)
        return f"1-{highest}?", {"number": number, "turns": 3 + level}, str(number)

    def start(self, params):
        """Return the state of an episode before its first turn, in JSON values."""
        return {**params, "guesses": 0}

    def step(self, state, response):
        """Answer a turn of the model: with a new state and a message, or with a verdict, which ends the episode."""
        state = {**state, "guesses": state["guesses"] + 1}
        guess = guess_in(response)
        if guess == state["number"]:
            return EnvironmentStep(verdict=Verdict.graded(True, reward=1 - 0.2 * (state["guesses"] - 1)))
        if state["guesses"] == state["turns"]:
            return EnvironmentStep(verdict=self.give_up(state))
        told = "?" if guess is None else ">" if guess < state["number"] else "<"
        return EnvironmentStep(state=state, messages=({"role": "user", "content": told},))

    def give_up(self, state):
        """Judge an episode that ends at a limit of turns or tokens."""
        return Verdict.graded(False, detail=f"{state['number']} was not found")

    def verify(self, params, response):
        """Judge a response as if it were the only turn."""
        return Verdict.graded(guess_in(response) == params["number"])
