"""The reading of answers as they are written: from text to trees."""

from rollfeed.rewards.equality.notation.parser import read

__all__ = ["read"]
