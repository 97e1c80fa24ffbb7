"""The policy that a trained one is kept near to."""

from rollfeed.training.reference.held import HeldReference

__all__ = ["HeldReference"]
