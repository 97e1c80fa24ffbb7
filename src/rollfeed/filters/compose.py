"""Several filters as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollfeed.errors import PluginError
from rollfeed.protocols import GroupFilter
from rollfeed.types import Drop, FilterDecision, Keep, Sample


@dataclass(frozen=True)
class ComposedFilter:
    """Ask filters in order; keep what all of them keep."""

    filters: tuple[GroupFilter, ...]

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return the first final Drop; else the first Drop that is still usable; else Keep.

        Raises:
            PluginError: If a filter returns anything but Keep or Drop.
        """
        usable: Drop | None = None
        for group_filter in self.filters:
            decision: object = group_filter(samples)
            if isinstance(decision, Drop) and not decision.usable:
                return decision
            if isinstance(decision, Drop):
                usable = decision if usable is None else usable
            elif not isinstance(decision, Keep):
                name = getattr(group_filter, "__name__", type(group_filter).__name__)
                raise PluginError(f"group filter {name} returned {decision!r}: return Keep() or Drop(reason)")
        return Keep() if usable is None else usable


def compose(filters: Sequence[GroupFilter]) -> GroupFilter:
    """Return one filter that drops what any of ``filters`` drops; without filters it keeps everything."""
    return ComposedFilter(tuple(filters))
