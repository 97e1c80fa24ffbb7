"""Which groups are new enough for a batch, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollfeed.config import StalenessPolicy
from rollfeed.types import STALE, ByAge, DroppedGroup, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeLimit:
    """Fits :class:`rollfeed.protocols.AgeRule`.

    A group that masking would leave without a token to train on is answered again: it would fill a place in the batch
    and teach nothing.
    """

    max_staleness: int | None
    """How many versions a token that is trained on may be behind; None for any number."""
    policy: StalenessPolicy

    def __call__(self, groups: Sequence[Group], *, policy_version: int) -> ByAge:
        """Sort groups for a batch that is stamped with ``policy_version``."""
        if self.max_staleness is None:
            return ByAge(fresh=tuple(groups))
        oldest_allowed = policy_version - self.max_staleness
        fresh: list[Group] = []
        requeued: list[Group] = []
        dropped: list[DroppedGroup] = []
        masked_tokens = 0
        for group in groups:
            oldest = group.oldest_trained_version
            if oldest is None or oldest >= oldest_allowed:
                fresh.append(group)
            elif self.policy is StalenessPolicy.DROP:
                dropped.append(DroppedGroup(group=group, reason=STALE))
            elif (
                self.policy is StalenessPolicy.MASK
                and (left := group.without_versions_before(oldest_allowed)).trained_tokens
            ):
                fresh.append(left)
                masked_tokens += group.trained_tokens - left.trained_tokens
            else:
                requeued.append(group)
        return ByAge(fresh=tuple(fresh), requeued=tuple(requeued), dropped=tuple(dropped), masked_tokens=masked_tokens)
