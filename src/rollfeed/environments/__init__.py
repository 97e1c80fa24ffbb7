"""Environments: generators of problems with verifiers, as prompt sources and as a grader."""

from rollfeed.environments.grading import RM_TYPE, environment_grader
from rollfeed.environments.registry import ENTRY_POINT_GROUP, EnvironmentRegistry
from rollfeed.environments.source import EnvironmentSource
from rollfeed.environments.tasks import make_task

__all__ = [
    "ENTRY_POINT_GROUP",
    "RM_TYPE",
    "EnvironmentRegistry",
    "EnvironmentSource",
    "environment_grader",
    "make_task",
]
