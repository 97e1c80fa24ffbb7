"""Killable processes that call plain functions; graders, reward functions and environments share them."""

from rollfeed.workers.pool import WorkerPool

__all__ = ["WorkerPool"]
