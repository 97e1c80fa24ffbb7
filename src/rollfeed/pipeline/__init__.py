"""Scheduling: from prompts to batches."""

from rollfeed.pipeline.group_runner import GroupPlan
from rollfeed.pipeline.observers import Observers
from rollfeed.pipeline.rollouts import RolloutParts, Rollouts
from rollfeed.pipeline.step_synchronous import StepSynchronous

__all__ = ["GroupPlan", "Observers", "RolloutParts", "Rollouts", "StepSynchronous"]
