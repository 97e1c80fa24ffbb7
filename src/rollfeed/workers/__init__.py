"""Killable processes that call plain functions; graders, reward functions and environments share them."""

from rollfeed.workers.on_demand import OnDemandPool
from rollfeed.workers.pool import PoolCounts, WorkerPool

__all__ = ["OnDemandPool", "PoolCounts", "WorkerPool"]
