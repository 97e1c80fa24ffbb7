"""What earlier answers were like: their lengths, by prompt."""

from rollfeed.history.lengths import LengthHistory

__all__ = ["LengthHistory"]
