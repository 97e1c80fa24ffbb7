"""A step: what makes its batch, what that may use, and where prompts wait between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Protocol

from rollfeed.types import BatchCut, ByAge, Ending, FilterDecision, Group, Rollout, SampleStatus

_KEPT = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED)


class BatchFilter(Protocol):
    """Chooses a batch among more finished groups than it needs. *Extension point*.

    What it does not choose is dropped, counted as ``over_sampled``, and never comes back.
    """

    def __call__(self, groups: Sequence[Group]) -> Sequence[int]:
        """Return indices of ``groups``, each at most once, those first that are to be trained on.

        There must be at least as many as a batch has groups; the first ones make the batch.
        """


class AgeRule(Protocol):
    """Decides which groups are new enough to be trained on, and what becomes of the others."""

    def __call__(self, groups: Sequence[Group], *, policy_version: int) -> ByAge:
        """Sort groups for a batch that is stamped with ``policy_version``."""


class BatchCutter(Protocol):
    """Holds the limit on staleness, orders the kept groups of a step and gives every sample its advantage."""

    def __call__(self, groups: Sequence[Group], *, step: int, policy_version: int) -> BatchCut | ByAge:
        """Return the batch, with the metrics that its groups alone give; or, if some are too old, which."""


@dataclass(slots=True, kw_only=True)
class RunningGroup:
    """A group in flight: what its members have so far, filled by what answers them."""

    group: Group
    """As it was submitted."""
    rollouts: list[Rollout]
    """One a member; without samples where nothing has been sampled."""
    policy_version: int
    """The oldest version that its tokens can have."""
    phase: str = "generating"
    """Or ``scoring``."""
    task: asyncio.Task[Group] = field(init=False)
    """Gives the group with what its members have in the end."""
    _rest: Group | None = field(init=False, default=None)
    _rest_of: tuple[Rollout, ...] = field(init=False, default=())
    """The members that the last rest was made of: every step asks for all of thousands, and few have changed."""

    @classmethod
    def of(cls, group: Group, *, n_samples_per_prompt: int, policy_version: int) -> RunningGroup:
        """Return a group that is to be answered, or resumed.

        Raises:
            ValueError: If an earlier execution left another number of rollouts than a group has.
        """
        num_rollouts, first = len(group.rollouts), group.group_index * n_samples_per_prompt
        if num_rollouts not in (0, n_samples_per_prompt):
            raise ValueError(
                f"group {group.group_index} has {num_rollouts} rollouts, n_samples_per_prompt is {n_samples_per_prompt}"
            )
        oldest = group.oldest_trained_version
        return cls(
            group=group,
            rollouts=list(group.rollouts)
            or [Rollout(rollout_id=first + member, samples=()) for member in range(n_samples_per_prompt)],
            policy_version=policy_version if oldest is None else min(oldest, policy_version),
        )

    def rest(self) -> Group:
        """Return the group with what can be kept of its members: finished rollouts, and aborted ones to be resumed."""
        if self._rest is None or not all(map(is_, self.rollouts, self._rest_of)):
            self._rest, self._rest_of = self._made_rest(), tuple(self.rollouts)
        return self._rest

    def _made_rest(self) -> Group:
        kept = tuple(
            rollout
            if not rollout.samples or rollout.status in _KEPT
            else Rollout(rollout_id=rollout.rollout_id, samples=())
            for rollout in self.rollouts
        )
        return replace(self.group, rollouts=kept if any(rollout.samples for rollout in kept) else ())


class RolloutContext(Protocol):
    """Everything that a rollout function may use to make a step."""

    @property
    def step(self) -> int:
        """The step's number, from 0."""

    @property
    def rollout_batch_size(self) -> int:
        """Groups to deliver. A function whose groups were too old is called again, for as many as are missing."""

    @property
    def surplus(self) -> Sequence[Group]:
        """Groups that were finished and kept earlier, by index; those that no ending names stay so."""

    @property
    def policy_version(self) -> int:
        """The engine's version now."""

    @property
    def running(self) -> Mapping[int, RunningGroup]:
        """Groups in flight, by index, in the order in which they were submitted; those that earlier steps left, too."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the batch; in ``async`` mode a step begins before that."""

    async def changed(self) -> Collection[int]:
        """Return when a group in flight has ended or the batch has become wanted, since the last call.

        What is returned are the indices of those that have ended since then and are still in flight.
        """

    async def draw(self, count: int) -> Sequence[Group]:
        """Take prompts: requeued ones first, then new ones; fewer only when the source has ended.

        A function whose batch is then short returns what it has: the run ends there, with the batches before.

        Raises:
            PromptsEndedError: If nothing was left the last time, and no group is in flight.
        """

    def submit(self, group: Group) -> asyncio.Task[Group]:
        """Start generating and scoring one group; the task never raises but for cancellation or a spent budget.

        It gives the group whole, whatever became of its rollouts: ``is_finished``, or with an ``error``, or aborted.
        """

    def decide(self, group: Group) -> FilterDecision:
        """Apply the group filters."""

    def requeue(self, group: Group) -> None:
        """Have a finished group answered again from the beginning, because it is too old; it is drawn before new ones.

        Its tokens count as wasted; no ending may name it.
        """

    async def abort(self) -> None:
        """End all submitted work within the grace period; afterwards every task is done."""


class RolloutFn(Protocol):
    """Makes a whole step. *Extension point*; the default is ``pipeline.scheduler``."""

    async def __call__(self, context: RolloutContext) -> Sequence[Ending]:
        """Return where groups went: exactly ``rollout_batch_size`` scored ones ``Trained``, and what became of others.

        A group that was drawn may be answered by the function itself, without :meth:`RolloutContext.submit`. What was
        drawn and is not named is requeued, and its tokens counted as wasted where it is not resumed.

        Groups whose tokens are older than ``max_staleness`` allows when the batch is cut are not delivered: the
        function is called again, in the same step, for what is missing then.
        """


class BufferPolicy(Protocol):
    """Chooses which waiting prompts leave the buffer next. *Extension point*.

    The buffer does the removing, so that a policy cannot lose a prompt. It must be a pure function: it is also asked
    for the order of all entries, when the buffer is to decide which of them can wait on the disk.
    """

    def __call__(self, entries: Sequence[Group], count: int, *, policy_version: int) -> Sequence[int]:
        """Return indices into ``entries``, the first to leave first: at most ``count``, each once.

        Args:
            entries: All that wait, by group index. Statuses, lengths, rewards and version spans are always there;
                what is on the disk has tokens of -1, logprobs of NaN, and no text or metadata.
            count: How many are asked for.
            policy_version: The engine's now.
        """


class PromptBuffer(Protocol):
    """Holds prompts that wait to be answered again or resumed."""

    def __len__(self) -> int:
        """Return how many wait."""

    def add(self, groups: Iterable[Group]) -> None:
        """Take prompts, all or none.

        Raises:
            RunFailedError: If one has another number of rollouts than a group, or is in the buffer already.
        """

    def take(self, count: int, *, policy_version: int) -> list[Group]:
        """Remove and return up to ``count`` prompts, in the order of the policy.

        Raises:
            PluginError: If the policy returns something else than indices, each once; nothing is removed.
        """

    def snapshot(self) -> Sequence[Group]:
        """Return all that wait, by group index; what is on the disk is read when it is asked for."""
