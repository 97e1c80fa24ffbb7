"""Trackers: metrics and samples of runs in W&B, TensorBoard, MLflow, Trackio, or wherever a user's own brings them.

Each works in a thread of its own behind a bounded queue: no run ends or waits because of one.
"""

from rollfeed.tracking.trackers import Trackers

__all__ = ["Trackers"]
