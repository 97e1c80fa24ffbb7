"""Mathematical equality of answers, in stages; see ``compare``."""

from rollfeed.rewards.equality.compare import compare
from rollfeed.rewards.equality.tree import Equality

__all__ = ["Equality", "compare"]
