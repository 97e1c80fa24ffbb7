"""Grades programs by running them against tests in a sandbox."""
