"""Scheduling: from prompts to batches."""

from rollfeed.pipeline.group_runner import GroupPlan
from rollfeed.pipeline.observers import Observers
from rollfeed.pipeline.rollouts import RolloutParts, Rollouts
from rollfeed.pipeline.scheduler import OverSampling, Scheduler
from rollfeed.pipeline.staleness import StalenessClock

__all__ = ["GroupPlan", "Observers", "OverSampling", "RolloutParts", "Rollouts", "Scheduler", "StalenessClock"]
