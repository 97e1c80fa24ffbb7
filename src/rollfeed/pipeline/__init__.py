"""Scheduling: from prompts to batches."""

from rollfeed.pipeline.groups import Activity, GroupPlan, GroupRunner
from rollfeed.pipeline.observers import Observers
from rollfeed.pipeline.placement import LengthHistory, Placement
from rollfeed.pipeline.rollouts import RolloutParts, Rollouts
from rollfeed.pipeline.scheduler import OverSampling, Scheduler
from rollfeed.pipeline.weight_follower import WeightFollower

__all__ = [
    "Activity",
    "GroupPlan",
    "GroupRunner",
    "LengthHistory",
    "Observers",
    "OverSampling",
    "Placement",
    "RolloutParts",
    "Rollouts",
    "Scheduler",
    "WeightFollower",
]
