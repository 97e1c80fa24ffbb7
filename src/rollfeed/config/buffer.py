"""``[buffer]`` and ``[placement]``: prompts that wait to be answered again or gone on with, and which start first."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from rollfeed.config.section import Free, Resume, Section


class BufferPolicyName(StrEnum):
    """The order in which waiting prompts leave."""

    FIFO = "fifo"
    FRESHEST = "freshest"
    MAX_STALENESS = "max_staleness"


class BufferSettings(Section, resume=Resume.PROMPTS):
    """The buffer of aborted and requeued prompts; `plugins.buffer_policy` replaces its policy."""

    policy: BufferPolicyName = Field(default=BufferPolicyName.FIFO, strict=False)
    """Which waiting prompts leave first: `fifo` in the order in which they were drawn; `freshest` those with the
    newest tokens; `max_staleness` those first that would soon be over `rollout.max_staleness`, and those that are
    over it last.
    """
    max_memory_mb: Free[int] = Field(default=1024, ge=1, le=1_000_000)
    """Partial answers over this many MiB wait on the disk, those that leave last."""


class PlacementSettings(Section, resume=Resume.PROMPTS):
    """The order of prompts by the lengths that their answers had before."""

    long_first: bool = False
    """Of the prompts submitted together, start those first whose answers were longest."""
    tail_batching: bool = False
    """Collect prompts with long answers, and answer them in a round of their own."""
