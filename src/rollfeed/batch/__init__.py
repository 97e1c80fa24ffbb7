"""From kept groups to what the trainer gets."""

from rollfeed.batch.advantages import batch_advantages, group_mean_advantages, leave_one_out_advantages
from rollfeed.batch.cut import batch_metrics, cut_batch
from rollfeed.batch.overlong import OverlongPenalty
from rollfeed.batch.staleness import AgeLimit

__all__ = [
    "AgeLimit",
    "OverlongPenalty",
    "batch_advantages",
    "batch_metrics",
    "cut_batch",
    "group_mean_advantages",
    "leave_one_out_advantages",
]
