"""Killable processes that call plain functions; graders and environments share them."""

from rollfeed.workers.grading import PooledGrader
from rollfeed.workers.on_demand import OnDemandPool
from rollfeed.workers.pool import PoolCounts, WorkerPool

__all__ = ["OnDemandPool", "PoolCounts", "PooledGrader", "WorkerPool"]
