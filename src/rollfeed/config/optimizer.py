"""``[train.optimizer]``: AdamW and its learning rate."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rollfeed.config.section import Free, Resume, Section


class LearningRateSchedule(StrEnum):
    """The course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSettings(Section, resume=Resume.ON_PURPOSE):
    """AdamW and its learning rate."""

    learning_rate: float = Field(default=1e-6, gt=0.0, le=10.0, strict=False)
    """At its highest."""
    schedule: LearningRateSchedule = Field(default=LearningRateSchedule.CONSTANT, strict=False)
    """After the warm-up: `constant`, or falling to `final_learning_rate_ratio` in a line or half a cosine."""
    warmup_updates: int = Field(default=0, ge=0, le=100_000_000)
    """Updates over which it rises in a line; the first one has the first part of it, not 0."""
    decay_batches: int | None = Field(default=None, ge=1, le=100_000_000)
    """Batches, the warm-up's among them, at the end of which it has fallen; it stays there afterwards. By default the
    `rollout.num_rollout` that the training began with, also where it goes on with more: see docs/training.md.
    """
    final_learning_rate_ratio: float = Field(default=0.0, ge=0.0, le=1.0, strict=False)
    """What is left of the learning rate in the last update."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, strict=False)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0, strict=False)
    """Decay of the mean of squared gradients."""
    epsilon: float = Field(default=1e-8, gt=0.0, le=1.0, strict=False)
    """Added to the root of the latter."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=10.0, strict=False)
    """Of matrices and embeddings; norms and biases are left alone."""
    max_grad_norm: float = Field(default=1.0, gt=0.0, le=1e9, strict=False)
    """Gradients with a larger norm are scaled down to it."""
    offload: Free[bool] = False
    """Keep the moments, 8 bytes a parameter, in the CPU's memory, and bring them to the GPU some parameters at a time:
    an update takes longer by moving them there and back.
    """
