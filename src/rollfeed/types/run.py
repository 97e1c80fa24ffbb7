"""The result of a step, and the state that a run resumes from after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any, ClassVar

from rollfeed.types.pictures import Picture
from rollfeed.types.records import Group, Rollout, TrainBatch

OVER_SAMPLED = "over_sampled"
"""The reason of a group that a batch filter left out."""
STALE = "stale"
"""The reason of a group that is too old to be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """The number of prompts drawn from the source, and of those in each place; the latter add up to it."""

    drawn: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    discarded: int = 0
    """Finished surplus thrown away by policy."""
    surplus: int = 0
    """Finished and kept for the next step."""
    requeued: int = 0
    """Waiting to be answered again, before new prompts."""
    in_flight: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every prompt drawn is accounted for exactly once."""
        return self.drawn == self.trained + self.dropped + self.failed + self.discarded + self.surplus + (
            self.requeued + self.in_flight
        )


class Place(StrEnum):
    """A place that a drawn prompt can be in; names are the fields of :class:`LedgerCounts`."""

    REQUEUED = "requeued"
    IN_FLIGHT = "in_flight"
    SURPLUS = "surplus"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Ending:
    """The place that a group of a step went to, and why: made by the rollout function, booked by the ledger."""

    place: ClassVar[Place]

    group: Group
    reason: str

    @property
    def wasted_tokens(self) -> int:
        """Response tokens that will not be trained on."""
        return self.group.response_tokens


@dataclass(frozen=True, slots=True)
class _Kept(Ending):
    @property
    def wasted_tokens(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Trained(_Kept):
    """In the step's batch."""

    place = Place.TRAINED
    reason: str = "chosen"


@dataclass(frozen=True, slots=True)
class Surplus(_Kept):
    """Finished and worth training on, for a later step."""

    place = Place.SURPLUS
    reason: str = "more_than_needed"


@dataclass(frozen=True, slots=True)
class Dropped(Ending):
    """Not to be trained on."""

    place = Place.DROPPED
    reason: str
    """A group filter's reason, ``over_sampled``, ``stale`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class Failed(Ending):
    """Not to be trained on, because a rollout failed; the reason is the first cause."""

    place = Place.FAILED


@dataclass(frozen=True, slots=True)
class Discarded(Ending):
    """Thrown away by policy."""

    place = Place.DISCARDED


@dataclass(frozen=True, slots=True)
class Requeued(Ending):
    """To be answered again, before new prompts."""

    place = Place.REQUEUED
    kept: tuple[Rollout, ...] | None = None
    """What is resumed then, one a member, empty where nothing was sampled; None where it begins anew."""

    @property
    def wasted_tokens(self) -> int:
        """Response tokens that are made again."""
        return self.group.response_tokens - self.waiting.response_tokens

    @property
    def waiting(self) -> Group:
        return replace(self.group, rollouts=self.kept or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ByAge:
    """Groups sorted by whether their tokens are new enough to be trained on; each is in one place."""

    fresh: tuple[Group, ...] = ()
    """As they may be trained on: where policy says so, tokens that are too old have lost their weight."""
    old: tuple[Dropped | Requeued, ...] = ()
    """The others, with the reason :data:`STALE`: not to be trained on, or to be answered from the beginning."""
    masked_tokens: int = 0
    """Tokens that lost their weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """A batch of groups that are all new enough."""

    batch: TrainBatch
    masked_tokens: int = 0
    """Tokens that lost their weight because they are too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that the next step depends on, as of a commit."""

    next_step: int
    next_group_index: int
    source: Mapping[str, Any]
    """The prompt source's own state; JSON values."""
    requeued: Sequence[Group] = ()
    """The buffer: prompts to be answered again or resumed, by group index."""
    surplus: tuple[Group, ...] = ()
    """Finished groups for later batches."""
    in_flight: tuple[Group, ...] = ()
    """What was being answered when the state was taken, as it was submitted; a process that resumes from here
    submits it again, first."""
    lengths: Mapping[str, Any] = field(default_factory=dict)
    """What was learned of response lengths; JSON values, empty where nothing is ordered by them."""
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    outcomes: tuple[bool, ...] = ()
    """How the last rollouts of groups that were decided ended, the oldest first; True ended well. What the failure
    budget looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """One finished step: what is delivered, and the state it leaves, to be stored in one go."""

    batch: TrainBatch
    dropped: tuple[Dropped, ...]
    """Ordered by group index."""
    wasted_tokens: Mapping[str, int]
    """Response tokens that will not be trained on, by reason."""
    state: RunState

    @property
    def pictures(self) -> dict[str, Picture]:
        """Those of all prompts and samples that are stored with it, by their hashes."""
        state = self.state
        decided = [*self.batch.groups, *(dropped.group for dropped in self.dropped)]
        groups = chain(decided, state.requeued, state.surplus, state.in_flight)
        shown = (images for group in groups for images in (group.prompt.images, *(s.images for s in group.samples)))
        return {picture.content_hash: picture for images in shown for picture in images}
