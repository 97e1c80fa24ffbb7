"""``[filters]``: which groups teach something."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from rollfeed.config.section import Resume, Section


class _Parameters(Section):
    model_config = ConfigDict(extra="allow")

    @property
    def parameters(self) -> dict[str, Any]:
        """The filter's own parameters."""
        return dict(self.__pydantic_extra__ or {})


class FilterSettings(_Parameters):
    """One filter by name; its other keys are the filter's own parameters."""

    name: str = Field(min_length=1)
    """A built-in filter; docs/filters.md lists them with their parameters."""


class OverSamplingSettings(_Parameters):
    """A filter that chooses a batch from more groups than it needs; the others are dropped."""

    name: str | None = Field(default=None, min_length=1)
    """`reward_std` or `length_balance`; none with `plugins.batch_filter`."""
    num_extra: int | None = Field(default=None, ge=1, le=1_000_000)
    """Groups to have beyond the batch before it is chosen; by default those of `rollout.over_sampling_batch_size` (or
    `over_sampling_factor`) that are more than a batch.
    """


class FiltersSettings(Section, resume=Resume.BATCHES):
    """Filters applied to every finished group, in order, the first that drops decides; then one that chooses."""

    dynamic_sampling: tuple[FilterSettings, ...] = Field(default=(), strict=False)
    """For example `[[filters.dynamic_sampling]]` with `name = "reward_std"`."""
    over_sampling: OverSamplingSettings | None = None
    """For example `[filters.over_sampling]` with `name = "reward_std"`; needs `rollout.over_sampling_batch_size` or
    `num_extra`.
    """
