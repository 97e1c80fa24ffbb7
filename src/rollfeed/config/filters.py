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


class FiltersSettings(Section):
    """Filters applied to every finished group, in order; the first that drops decides."""

    dynamic_sampling: tuple[FilterSettings, ...] = Field(default=(), strict=False)
    """For example `[[filters.dynamic_sampling]]` with `name = "reward_std"`."""
