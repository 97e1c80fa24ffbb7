"""The failure budget: how many rollouts may fail before the run stops with the first cause."""

from __future__ import annotations

from rollfeed.errors import RunFailedError


class FailureBudget:
    """Counts failed rollouts of a run; more than ``limit`` of them end it."""

    def __init__(self, limit: int, *, spent: int = 0) -> None:
        self._limit = limit
        self.spent = spent
        self._first_cause: str | None = None

    def record(self, cause: str) -> None:
        """Count one failure.

        Raises:
            RunFailedError: If that was one more than the budget allows; it names the first cause.
        """
        self.spent += 1
        self._first_cause = self._first_cause or cause
        if self.spent > self._limit:
            raise RunFailedError(
                f"{self.spent} rollouts failed, more than rollout.failure_budget = {self._limit}; "
                f"the first one: {self._first_cause}"
            )
