"""The learning rate of each update."""

from __future__ import annotations

import math

from rollfeed.config.train import LearningRateSchedule


def learning_rate(
    update: int,
    *,
    peak: float,
    schedule: LearningRateSchedule,
    num_updates: int,
    warmup_updates: int,
    final_ratio: float,
) -> float:
    """Return the learning rate of an update, a function of its number alone.

    Args:
        update: From 0; what is over ``num_updates`` has the last one's.
        peak: The rate after the warm-up.
        schedule: How it goes on from there.
        num_updates: Updates of the whole run.
        warmup_updates: How many rise in a line, the first by one part of it.
        final_ratio: What is left of the peak in the last update, unless it is constant.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule is LearningRateSchedule.CONSTANT:
        return peak
    falling = max(1, num_updates - warmup_updates - 1)
    progress = min(1.0, (update - warmup_updates) / falling)
    left = 1.0 - progress if schedule is LearningRateSchedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (final_ratio + (1.0 - final_ratio) * left)
