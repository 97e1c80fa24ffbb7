"""Checks of instructions that a response can be seen to follow."""

from rollfeed.rewards.ifeval.arguments import ArgumentError
from rollfeed.rewards.ifeval.instructions import INSTRUCTIONS, follows, loose_forms

__all__ = ["INSTRUCTIONS", "ArgumentError", "follows", "loose_forms"]
