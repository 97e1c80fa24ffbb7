"""Books where every drawn prompt is, and how the groups of a step ended.

Invariant: every prompt drawn ends exactly once: trained, dropped with a reason, failed or
discarded by policy; until then it is in flight, surplus or requeued.
"""

from __future__ import annotations

from collections import Counter

from rollfeed.types import OVER_SAMPLED, STALE, Ending, LedgerCounts, Place

_WITHOUT_FILTER = (OVER_SAMPLED, STALE)
"""Reasons that no group filter gave."""
_MOVES: dict[Place, frozenset[Place]] = {
    Place.REQUEUED: frozenset({Place.IN_FLIGHT, Place.REQUEUED}),
    Place.SURPLUS: frozenset({Place.TRAINED, Place.DISCARDED, Place.SURPLUS, Place.DROPPED, Place.REQUEUED}),
    Place.IN_FLIGHT: frozenset(set(Place) - {Place.IN_FLIGHT}),
}


class Ledger:
    """Counts every prompt in exactly one place; an illegal move is a bug and raises AssertionError."""

    def __init__(self, counts: LedgerCounts, *, requeued: list[int], surplus: list[int]) -> None:
        self._drawn = counts.drawn
        self._ended = Counter({place: getattr(counts, place.value) for place in Place if place not in _MOVES})
        self._live: dict[int, Place] = dict.fromkeys(requeued, Place.REQUEUED) | dict.fromkeys(surplus, Place.SURPLUS)
        self.begin_step()
        assert self.counts().balanced, f"restored ledger does not balance: {self.counts()}"

    def begin_step(self) -> None:
        """Count what follows as a step's."""
        self.num_submitted = 0
        """Groups of the step."""
        self._endings: Counter[tuple[Place, str]] = Counter()
        self._wasted_tokens: Counter[str] = Counter()

    def draw(self, group_index: int) -> None:
        """Enter a new prompt; it waits, as a requeued one does."""
        assert group_index not in self._live, f"group {group_index} was drawn twice"
        self._drawn += 1
        self._live[group_index] = Place.REQUEUED

    def submit(self, group_index: int) -> None:
        """Say that a prompt that waits is answered now."""
        self._move(group_index, Place.IN_FLIGHT)
        self.num_submitted += 1

    def book(self, ending: Ending) -> None:
        """Move a prompt to where its group went; at a place where prompts end it is counted and forgotten."""
        self._move(ending.group.group_index, ending.place)
        self._endings[ending.place, ending.reason] += 1
        self.waste(ending.reason if ending.reason in _WITHOUT_FILTER else ending.place.value, ending.wasted_tokens)

    def waste(self, reason: str, num_tokens: int) -> None:
        """Count tokens of the step that will not be trained on."""
        self._wasted_tokens[reason] += num_tokens

    def place(self, group_index: int) -> Place | None:
        """Return where a prompt is; None when it has ended or was never drawn."""
        return self._live.get(group_index)

    def counts(self) -> LedgerCounts:
        """Return how many prompts are in each place."""
        live = Counter(self._live.values())
        return LedgerCounts(drawn=self._drawn, **{p.value: self._ended[p] + live[p] for p in Place})

    def wasted_tokens(self) -> dict[str, int]:
        """Return the step's tokens that will not be trained on, by reason."""
        return {reason: tokens for reason, tokens in sorted(self._wasted_tokens.items()) if tokens}

    def step_metrics(self) -> dict[str, float]:
        """Return how many groups of the step went where, and which tokens are wasted: ``rollout/...`` numbers."""
        by_place, by_reason = Counter[Place](), Counter[str]()
        for (place, reason), count in self._endings.items():
            by_place[place] += count
            by_reason[reason] += count if reason in _WITHOUT_FILTER else 0
        places = (Place.DROPPED, Place.FAILED, Place.SURPLUS, Place.DISCARDED, Place.REQUEUED)
        return {
            #: rollout/groups_submitted: groups begun in the step
            "rollout/groups_submitted": float(self.num_submitted),
            #: rollout/groups_dropped: groups dropped for whatever reason
            #: rollout/groups_failed: groups with a rollout that failed for good
            #: rollout/groups_surplus: groups that finished and are kept for a later step
            #: rollout/groups_discarded: groups that finished and are thrown away, as `rollout.surplus` says
            #: rollout/groups_requeued: groups that are to be answered again
            **{f"rollout/groups_{place.value}": float(by_place[place]) for place in places},
            #: rollout/groups_over_sampled: groups that a batch filter left out
            #: rollout/groups_stale: groups that were too old for the batch
            **{f"rollout/groups_{reason}": float(by_reason[reason]) for reason in _WITHOUT_FILTER},
            **{
                #: rollout/dynamic_filter/drop_<reason>: groups that a filter dropped for this reason
                f"rollout/dynamic_filter/drop_{reason}": float(count)
                for (place, reason), count in self._endings.items()
                if place is Place.DROPPED and reason not in _WITHOUT_FILTER
            },
            #: rollout/wasted_tokens/<reason>: tokens of the step that are never trained on
            **{f"rollout/wasted_tokens/{reason}": float(tokens) for reason, tokens in self.wasted_tokens().items()},
        }

    def _move(self, group_index: int, place: Place) -> None:
        here = self._live.get(group_index)
        assert here is not None, f"group {group_index} has ended or was never drawn; it cannot be {place.value}"
        assert place in _MOVES[here], f"group {group_index} cannot go from {here.value} to {place.value}"
        if place in _MOVES:
            self._live[group_index] = place
            return
        del self._live[group_index]
        self._ended[place] += 1
