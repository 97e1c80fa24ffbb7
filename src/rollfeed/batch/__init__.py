"""From kept groups to what the trainer gets."""

from rollfeed.batch.advantages import group_advantages
from rollfeed.batch.cut import batch_metrics, cut_batch
from rollfeed.batch.staleness import AgeLimit

__all__ = ["AgeLimit", "batch_metrics", "cut_batch", "group_advantages"]
