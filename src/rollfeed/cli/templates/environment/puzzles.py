"""An environment: problems that are made, not stored, and verified."""

from rollfeed.types import Verdict


class Doubling:
    """Numbers to be doubled; a level more, a digit more."""

    environment_id, version, summary, max_level = "mine/doubling", 1, "double a number", 4

    def make(self, level, random):
        """Return a question, all that `verify` needs (JSON values), and the right answer; use no other randomness."""
        number = random.randrange(5 * 10**level)
        return f"{number}+{number}=", {"number": number}, str(2 * number)

    def verify(self, params, response):
        """Judge a response."""
        right = str(2 * params["number"])
        if response == right:
            return Verdict.graded(True)
        return Verdict.graded(False, reward=0.5 if response.startswith(right[0]) else 0.0, format_ok=response.isdigit())
