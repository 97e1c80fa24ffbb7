"""Tensors of a trainer as the servers of a checkpoint hold them: names, shapes, types, and FP8 with its scales."""

from rollfeed.weights.serving.dry_run import served_tensors
from rollfeed.weights.serving.form import ServingForm

__all__ = ["ServingForm", "served_tensors"]
