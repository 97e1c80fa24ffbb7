"""``[reward]``: how answers are scored."""

from __future__ import annotations

from pydantic import Field

from rollfeed.config.section import Section


class RewardSettings(Section):
    """Graders for prompts that bring none of their own; `[plugins]` has custom functions."""

    rm_type: str | None = Field(default=None, min_length=1)
    """Grader by name: `exact` or `number`. Prompts of environments use their own verifier."""
    reward_key: str | None = Field(default=None, min_length=1)
    """Which entry of a reward dictionary is the reward."""
    timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """A reward call that takes longer fails its rollout; it is never a reward of 0."""
