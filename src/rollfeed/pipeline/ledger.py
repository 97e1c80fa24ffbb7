"""Where every drawn prompt is.

Invariant: every prompt drawn ends exactly once: trained, dropped with a reason, failed or
discarded by policy; until then it is in flight, surplus or requeued.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from rollfeed.types import LedgerCounts


class Place(StrEnum):
    """Where a drawn prompt can be; names are the fields of :class:`LedgerCounts`."""

    REQUEUED = "requeued"
    IN_FLIGHT = "in_flight"
    SURPLUS = "surplus"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    DISCARDED = "discarded"


_MOVES: dict[Place, frozenset[Place]] = {
    Place.REQUEUED: frozenset({Place.IN_FLIGHT}),
    Place.SURPLUS: frozenset({Place.TRAINED, Place.DISCARDED, Place.SURPLUS, Place.DROPPED, Place.REQUEUED}),
    Place.IN_FLIGHT: frozenset(set(Place) - {Place.IN_FLIGHT}),
}


class Ledger:
    """Counts every prompt in exactly one place; an illegal move is a bug and raises AssertionError."""

    def __init__(self, counts: LedgerCounts, *, requeued: list[int], surplus: list[int]) -> None:
        self._drawn = counts.drawn
        self._ended = Counter({place: getattr(counts, place.value) for place in Place if place not in _MOVES})
        self._live: dict[int, Place] = dict.fromkeys(requeued, Place.REQUEUED) | dict.fromkeys(surplus, Place.SURPLUS)
        assert self.counts().balanced, f"restored ledger does not balance: {self.counts()}"

    def draw(self, group_index: int) -> None:
        """Enter a new prompt; it waits, as a requeued one does."""
        assert group_index not in self._live, f"group {group_index} was drawn twice"
        self._drawn += 1
        self._live[group_index] = Place.REQUEUED

    def move(self, group_index: int, place: Place) -> None:
        """Move a prompt; at a place where prompts end it is counted and forgotten."""
        here = self._live.get(group_index)
        assert here is not None, f"group {group_index} has ended or was never drawn; it cannot be {place.value}"
        assert place in _MOVES[here], f"group {group_index} cannot go from {here.value} to {place.value}"
        if place in _MOVES:
            self._live[group_index] = place
            return
        del self._live[group_index]
        self._ended[place] += 1

    def place(self, group_index: int) -> Place | None:
        """Return where a prompt is; None when it has ended or was never drawn."""
        return self._live.get(group_index)

    def counts(self) -> LedgerCounts:
        """Return how many prompts are in each place."""
        live = Counter(self._live.values())
        return LedgerCounts(drawn=self._drawn, **{p.value: self._ended[p] + live[p] for p in Place})
