"""Rewards: graders by ``rm_type``, and the hub that calls them or the user's function."""

from rollfeed.rewards.exact import grade_exact
from rollfeed.rewards.graders import BUILTIN_GRADERS
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.number import grade_number

__all__ = ["BUILTIN_GRADERS", "RewardHub", "grade_exact", "grade_number"]
