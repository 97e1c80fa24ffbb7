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
        begins_right = response.startswith(right)
        # Less where something follows, and a little for the first digit, so that there is something to learn from.
        reward = len(right) / len(response) if begins_right else 0.1 * response.startswith(right[0])
        return Verdict.graded(response == right, reward=reward, format_ok=response.isdigit())
