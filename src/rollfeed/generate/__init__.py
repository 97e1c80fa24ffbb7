"""From a prompt to samples."""

from rollfeed.generate.episode import Episode
from rollfeed.generate.given_answer import given_answer
from rollfeed.generate.multi_turn import by_environment, multi_turn
from rollfeed.generate.single_turn import single_turn

__all__ = ["Episode", "by_environment", "given_answer", "multi_turn", "single_turn"]
