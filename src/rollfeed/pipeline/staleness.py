"""Bounds the age of a batch's tokens, in policy versions, and tells the scheduler what that asks of it.

A group that is in flight or finished can wait for at most ``max_staleness`` further versions. It is assumed that
every batch leads to one new version: then no group ever becomes too old, as long as a batch is cut only when those
that remain can all be trained in time, and new groups begin only when there will be room for them. What comes too
late all the same, because versions came faster, is found before the batch is chosen, and when it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class StalenessClock:
    """Counts batches and versions; one a run."""

    max_staleness: int
    groups_per_batch: int
    """Groups that a batch takes, those that a batch filter leaves out included."""
    _version: int | None = None
    _first_version: int | None = None
    _num_cuts: int = 0
    """Since the version last changed."""

    def see(self, policy_version: int) -> None:
        """Take note of the engine's version."""
        if self._first_version is None:
            self._first_version = policy_version
        if policy_version != self._version:
            self._version, self._num_cuts = policy_version, 0

    def cut(self) -> None:
        """Take note of a batch that will lead to a new version."""
        self._num_cuts += 1

    def max_live_groups(self, *, is_wanted: bool) -> int:
        """Return how many groups may be in flight or wait finished, so that the next one will be trained in time.

        Args:
            is_wanted: Whether somebody waits for the batch: then it is cut at the present version, whatever was
                expected, and all of it may be made now.
        """
        # Where versions do not come, nothing becomes old, however many batches there were.
        most = self.max_staleness + 1 if self._version != self._first_version else 1
        num_batches = self.max_staleness + 1 - min(self._num_cuts, most)
        return max(1 if is_wanted else 0, num_batches) * self.groups_per_batch

    def must_wait(self, finished: Sequence[int], running: Sequence[int], *, policy_version: int) -> bool:
        """Whether a batch cut now would leave groups that could not all be trained in time.

        Args:
            finished: Versions of the finished groups that the batch would leave.
            running: Versions of the groups in flight.
            policy_version: The engine's.
        """
        left, oldest = sorted([*finished, *running]), min(running, default=None)
        for number, version in enumerate(left, start=1):
            num_batches = version + self.max_staleness - policy_version
            if number > max(0, num_batches) * self.groups_per_batch and oldest is not None and oldest <= version:
                return True
        return False
