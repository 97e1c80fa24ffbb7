"""Tensors of a trainer as the servers of a checkpoint hold them: names, shapes, types, and FP8 with its scales."""

from rollfeed.weights.serving.form import ServingForm

__all__ = ["ServingForm"]
