"""Grades programs by running them against tests in a sandbox."""

from rollfeed.rewards.code.grader import CodeGrader

__all__ = ["CodeGrader"]
