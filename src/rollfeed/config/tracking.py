"""``[tracking]``: where metrics and samples go besides the run directory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rollfeed.config.section import Resume, Section


class TrackerName(StrEnum):
    """The trackers that are known by name; each is an extra of the package."""

    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class TrackingSettings(Section, resume=Resume.FREE):
    """Trackers, told of steps, updates and evaluations once they are stored; see docs/trackers.md.

    Keys of accounts stay in the environment, where trackers look for them. A tracker that fails never ends a run.
    """

    trackers: tuple[Annotated[TrackerName, Field(strict=False)], ...] = Field(default=(), strict=False)
    """Any of `wandb`, `tensorboard`, `mlflow` and `trackio`; each needs `pip install 'rollfeed[<name>]'`."""
    project: str = Field(default="rollfeed", min_length=1)
    """The project; the experiment of MLflow. TensorBoard has none."""
    group: str | None = Field(default=None, min_length=1)
    """What several runs belong to, such as the seeds of one experiment."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the run; by default that of its directory."""
    num_samples: int = Field(default=8, ge=0, le=1000)
    """Rows of a table of samples, spread over the batch or the set; 0 for none."""
    samples_interval: int = Field(default=10, ge=1, le=1_000_000)
    """Steps from one table of a batch's samples to the next; evaluations have one each."""
