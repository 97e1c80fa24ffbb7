"""From a prompt to samples."""

from rollfeed.generate.default import default_generate
from rollfeed.generate.episode import Episode
from rollfeed.generate.given_answer import given_answer
from rollfeed.generate.multi_turn import multi_turn

__all__ = ["Episode", "default_generate", "given_answer", "multi_turn"]
