"""From kept groups to what the trainer gets."""

from rollfeed.batch.advantages import (
    batch_advantages,
    equal_advantages,
    group_mean_advantages,
    leave_one_out_advantages,
)
from rollfeed.batch.cut import AgeLimit, OverlongPenalty, batch_metrics, cut_batch
from rollfeed.batch.kl_rewards import advantages_less_kl

__all__ = [
    "AgeLimit",
    "OverlongPenalty",
    "advantages_less_kl",
    "batch_advantages",
    "batch_metrics",
    "cut_batch",
    "equal_advantages",
    "group_mean_advantages",
    "leave_one_out_advantages",
]
