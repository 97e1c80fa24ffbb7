"""Several filters as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollfeed.faults import blaming, complaint, is_own
from rollfeed.protocols import GroupFilter
from rollfeed.types import Drop, FilterDecision, Keep, Sample


@dataclass(frozen=True)
class ComposedFilter:
    """Ask filters in order; keep what all of them keep."""

    filters: tuple[GroupFilter, ...]

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return the first final Drop; else the first Drop that is still usable; else Keep.

        Raises:
            RunFailedError: If a filter raises, or returns anything but Keep or Drop.
        """
        usable: Drop | None = None
        for group_filter in self.filters:
            setting = "filters.dynamic_sampling" if is_own(group_filter) else "plugins.group_filters"
            with blaming(setting, group_filter):
                decision: object = group_filter(samples)
            if isinstance(decision, Drop) and not decision.usable:
                return decision
            if isinstance(decision, Drop):
                usable = decision if usable is None else usable
            elif not isinstance(decision, Keep):
                raise complaint(setting, group_filter, f"returned {decision!r:.80}; return Keep() or Drop(reason)")
        return Keep() if usable is None else usable


def compose(filters: Sequence[GroupFilter]) -> GroupFilter:
    """Return one filter that drops what any of ``filters`` drops; without filters it keeps everything."""
    return ComposedFilter(tuple(filters))
