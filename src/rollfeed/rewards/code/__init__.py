"""Grades programs by running them against tests in a sandbox."""

from rollfeed.rewards.code.grader import CodeGrader, InTurns
from rollfeed.rewards.code.problem import tests_problem

__all__ = ["CodeGrader", "InTurns", "tests_problem"]
