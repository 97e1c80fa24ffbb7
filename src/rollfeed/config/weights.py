"""``[weights]``: where new policy weights come from while a run goes on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from rollfeed.config.section import Resume, Section
from rollfeed.types.probe import MOST_TOKENS


class WeightSource(StrEnum):
    """The source of new weights."""

    NONE = "none"
    DIRECTORY = "directory"


ON_CPU, ON_GPU = 12, 64
"""Texts of a proof."""


class ProofSettings(Section):
    """The proof, after an update, that an engine has the new weights: it and the publisher score the same texts.

    See docs/weights.md for what is found with how many.
    """

    num_texts: int | None = Field(default=None, ge=0, le=256)
    """Texts that are scored, taken from the first batch; 0 takes the engine's word for it. By default 12, and 64 where
    the trainer computes on a GPU: engines that go with it are less precise.
    """
    num_tokens: int = Field(default=48, ge=8, le=1024)
    """Most tokens of each: the end of a prompt and the beginning of its answer."""

    @model_validator(mode="after")
    def _is_small(self) -> ProofSettings:
        num_texts = ON_GPU if self.num_texts is None else self.num_texts
        if num_texts * self.num_tokens > MOST_TOKENS:
            raise ValueError(
                f"num_texts = {num_texts} times num_tokens = {self.num_tokens} is more than {MOST_TOKENS} tokens, "
                "which every update would have to wait for: lower one of them"
            )
        return self


class WeightSettings(Section, resume=Resume.FREE):
    """New weights of a trainer that is not part of this program; see docs/weights.md."""

    source: Annotated[WeightSource, Resume.ANSWERS] = Field(default=WeightSource.NONE, strict=False)
    """`directory` watches a folder for complete checkpoints and has the engine load the newest; `none` keeps the
    checkpoint's weights, or what a program gives `update_weights`.
    """
    directory: str | None = Field(default=None, min_length=1)
    """The folder, which the engine's servers must see under the same path; or a URL as `s3://bucket/run-7`, from which
    each checkpoint is fetched to a temporary folder here. A trainer writes each checkpoint under a name that begins
    with a dot or ends in `.tmp`, and then renames it to one that ends in its version, for example `version-000012`.
    """
    poll_seconds: float = Field(default=1.0, gt=0.0, le=3600.0, strict=False)
    """Between two looks at the folder."""
    proof: ProofSettings = ProofSettings()
    """What makes sure that an update has arrived."""
    timeout_seconds: float = Field(default=1800.0, gt=0.0, le=604_800.0, strict=False)
    """How long a step waits for a version that it needs, before the run ends with what is there."""

    @model_validator(mode="after")
    def _fits_together(self) -> WeightSettings:
        if self.source is WeightSource.DIRECTORY and self.directory is None:
            raise ValueError("source = 'directory' needs to know which: set weights.directory")
        if self.source is WeightSource.NONE and self.directory is not None:
            raise ValueError(
                f"directory = {self.directory!r} is not looked at while source = 'none': set weights.source = "
                "'directory', or remove it"
            )
        return self
