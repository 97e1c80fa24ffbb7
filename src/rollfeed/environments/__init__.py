"""Environments: generators of problems with verifiers, as prompt sources and as graders."""

from rollfeed.environments.grading import (
    RLVE_KEYS,
    RLVE_RM_TYPE,
    RM_TYPE,
    EnvironmentGrader,
    RlveGrader,
    environment_problem,
    rlve_problem,
)
from rollfeed.environments.registry import ENTRY_POINT_GROUP, EnvironmentRegistry
from rollfeed.environments.source import EnvironmentSource
from rollfeed.environments.tasks import HasGuessRate, hidden_text, make_task, with_parameters

__all__ = [
    "ENTRY_POINT_GROUP",
    "RLVE_KEYS",
    "RLVE_RM_TYPE",
    "RM_TYPE",
    "EnvironmentGrader",
    "EnvironmentRegistry",
    "EnvironmentSource",
    "HasGuessRate",
    "RlveGrader",
    "environment_problem",
    "hidden_text",
    "make_task",
    "rlve_problem",
    "with_parameters",
]
