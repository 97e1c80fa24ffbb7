"""One group: its way to the engine, its members, and what is left of it when it is stopped."""

from rollfeed.pipeline.groups.failures import FailureBudget
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import START_ROLLOUT_ID, GroupPlan, GroupRunner

__all__ = [
    "START_ROLLOUT_ID",
    "EngineGate",
    "FailureBudget",
    "GroupPlan",
    "GroupRunner",
]
