"""``[train.warm_up]``: supervised updates before the first batch."""

from __future__ import annotations

from pydantic import Field

from rollfeed.config.section import Resume, Section


class WarmUpSettings(Section, resume=Resume.WARM_UP):
    """Supervised updates before the first batch, on labels of the run's own prompts.

    For a model that knows nothing of the task yet: it has no right answer to learn from.
    """

    stop_accuracy: float = Field(gt=0.0, lt=1.0, strict=False)
    """Ends as soon as this share of sampled answers is right, on prompts of training."""
    wrong_share: float = Field(default=0.0, ge=0.0, lt=1.0, strict=False)
    """Share of prompts that are taught the label of another prompt, so that the model learns the form of an answer and
    something of its content, and is unsure of it.
    """
    batch_size: int = Field(default=64, ge=2, le=1_000_000)
    """Prompts of an update."""
    learning_rate: float = Field(default=1e-3, gt=0.0, le=10.0, strict=False)
    """Of these updates; their AdamW is apart from that of training."""
    probe_interval: int = Field(default=20, ge=1, le=1_000_000)
    """Updates between two measurements of the accuracy."""
    probe_prompts: int = Field(default=512, ge=1, le=1_000_000)
    """Prompts of a measurement, each answered once as in training."""
    max_updates: int = Field(default=5000, ge=1, le=100_000_000)
    """The run fails when the accuracy is not reached by then."""
