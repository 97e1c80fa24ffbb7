"""From kept groups to what the trainer gets."""

from rollfeed.batch.advantages import group_advantages
from rollfeed.batch.cut import batch_metrics, cut_batch

__all__ = ["batch_metrics", "cut_batch", "group_advantages"]
