"""``[filters]``: which groups teach something."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from rollfeed.config.section import Section


class FilterSettings(Section):
    """One filter by name; its other keys are the filter's own parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    """A built-in filter; docs/filters.md lists them with their parameters."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The filter's own parameters."""
        return dict(self.__pydantic_extra__ or {})


class OverSamplingSettings(FilterSettings):
    """A filter that chooses a batch from more groups than it needs; the others are surplus."""

    num_extra: int | None = Field(default=None, ge=1, le=1_000_000)
    """Groups to keep beyond the batch before it is chosen; by default all that a step starts with."""


class FiltersSettings(Section):
    """Filters applied to every finished group, in order, the first that drops decides; then one that chooses."""

    dynamic_sampling: tuple[FilterSettings, ...] = Field(default=(), strict=False)
    """For example `[[filters.dynamic_sampling]]` with `name = "reward_std"`."""
    over_sampling: OverSamplingSettings | None = None
    """For example `[filters.over_sampling]` with `name = "reward_std"`; needs `rollout.over_sampling_batch_size`."""
