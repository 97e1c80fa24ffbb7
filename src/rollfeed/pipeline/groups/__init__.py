"""One group: its way to the engine, its members, and what is left of it when it is stopped."""

from rollfeed.pipeline.groups.failures import FailureBudget
from rollfeed.pipeline.groups.gate import EngineGate
from rollfeed.pipeline.groups.group_runner import GroupPlan, GroupRunner
from rollfeed.pipeline.groups.step_clock import Activity

__all__ = [
    "Activity",
    "EngineGate",
    "FailureBudget",
    "GroupPlan",
    "GroupRunner",
]
