"""What a step leaves behind, and what a run needs to go on after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollfeed.types.records import Group, PromptDraw, TrainBatch

OVER_SAMPLED = "over_sampled"
"""The reason of a group that a batch filter left out."""
STALE = "stale"
"""The reason of a group that is too old to be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Where every prompt drawn from the source is; the counts after the first add up to it."""

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


class GroupStatus(StrEnum):
    """How the work on a group ended."""

    FINISHED = "finished"
    """All rollouts finished and are scored."""
    ABORTED = "aborted"
    """Cut short by the end of the step; not to be trained on."""
    FAILED = "failed"
    """At least one rollout failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A group as its runner lets go of it: always whole, whatever became of its rollouts."""

    group: Group
    status: GroupStatus
    cause: str = ""
    """The first failure, for FAILED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that will not be trained on, and why."""

    group: Group
    reason: str
    """A group filter's reason, :data:`OVER_SAMPLED`, :data:`STALE` or ``failed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutput:
    """What a rollout function returns: where the groups of its step went.

    Prompts that it drew and does not name here are requeued, and their tokens counted as wasted.
    """

    groups: tuple[Group, ...]
    """The batch: exactly ``rollout_batch_size`` groups."""
    dropped: tuple[DroppedGroup, ...] = ()
    failed: tuple[GroupResult, ...] = ()
    surplus: tuple[Group, ...] = ()
    """Finished and worth training on, for the next step."""
    discarded: tuple[Group, ...] = ()
    """Thrown away by policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByAge:
    """Groups sorted by whether their tokens are new enough to be trained on; each is in one place."""

    fresh: tuple[Group, ...] = ()
    """As they may be trained on: where policy says so, tokens that are too old have lost their weight."""
    requeued: tuple[Group, ...] = ()
    """To be answered again, from the beginning."""
    dropped: tuple[DroppedGroup, ...] = ()
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
    requeued: Sequence[PromptDraw] = ()
    """The buffer: prompts to be answered again or gone on with, by group index."""
    surplus: tuple[Group, ...] = ()
    """Finished groups for later batches."""
    in_flight: tuple[PromptDraw, ...] = ()
    """What was being answered when the state was taken, as it was submitted; a process that goes on from here
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
    dropped: tuple[DroppedGroup, ...]
    """Ordered by group index."""
    wasted_tokens: Mapping[str, int]
    """Response tokens that will not be trained on, by reason."""
    state: RunState
