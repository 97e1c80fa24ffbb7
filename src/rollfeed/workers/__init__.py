"""Killable processes that call plain functions; graders, reward functions and environments share them."""

from rollfeed.workers.pool import PoolCounts, WorkerPool

__all__ = ["PoolCounts", "WorkerPool"]
