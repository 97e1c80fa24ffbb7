"""The default rollout function: one step, one batch.

Prompts are submitted until groups in flight plus groups kept reach the target; as groups finish, the
filter keeps or drops them; when enough are kept, the rest is aborted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollfeed.config import GroupFailurePolicy, Refill, SurplusPolicy
from rollfeed.errors import RunFailedError
from rollfeed.protocols import RolloutContext
from rollfeed.types import Drop, DroppedGroup, Group, GroupResult, GroupStatus, RolloutOutput


@dataclass(slots=True)
class _Step:
    """What has become of the step's groups so far."""

    context: RolloutContext
    kept: list[Group] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    fallback: list[Group] = field(default_factory=list)
    """Dropped, but better than an incomplete batch."""
    failed: list[GroupResult] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    aborted: list[Group] = field(default_factory=list)
    pending: list[asyncio.Task[GroupResult]] = field(default_factory=list)
    """Submitted and not yet decided, in submission order."""
    num_drawn: int = 0
    source_ended: bool = False
    owed: int = 0
    """Groups to submit whatever the refill rule says."""

    @property
    def is_full(self) -> bool:
        return len(self.kept) >= self.context.rollout_batch_size

    def settle(self, result: GroupResult) -> None:
        if result.status is GroupStatus.FAILED:
            self.failed.append(result)
        elif result.status is GroupStatus.ABORTED:
            self.aborted.append(result.group)
        else:
            self._decide(result.group)

    def _decide(self, group: Group) -> None:
        decision = self.context.decide(group)
        if isinstance(decision, Drop):
            self.dropped.append(DroppedGroup(group=group, reason=decision.reason))
            if decision.usable:
                self.fallback.append(group)
        elif self.is_full:
            self.surplus.append(group)
        else:
            self.kept.append(group)

    def use_fallback(self) -> None:
        """Fill the batch with groups that were dropped but may be used when the step is short."""
        missing = self.context.rollout_batch_size - len(self.kept)
        chosen = sorted(self.fallback, key=lambda group: group.group_index)[:missing]
        indices = {group.group_index for group in chosen}
        self.kept += chosen
        self.dropped = [dropped for dropped in self.dropped if dropped.group.group_index not in indices]

    def shortage(self) -> str:
        """Say why the batch is short."""
        reasons = Counter(dropped.reason for dropped in self.dropped)
        told = [f"{count} dropped as {reason}" for reason, count in reasons.most_common(3)]
        told += [f"{len(self.failed)} failed, the first one: {self.failed[0].cause}"] if self.failed else []
        why = "the prompt source has ended" if self.source_ended else "rollout.max_draws_per_batch is reached"
        return (
            f"step {self.context.step} has {len(self.kept)} of {self.context.rollout_batch_size} groups after "
            f"{self.num_drawn} prompts and {why} ({'; '.join(told) or 'nothing dropped or failed'})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSynchronous:
    """Fits :class:`rollfeed.protocols.RolloutFn`."""

    refill: Refill
    deterministic: bool
    surplus: SurplusPolicy
    requeue_aborted: bool
    group_failure: GroupFailurePolicy
    max_draws_per_batch: int

    async def __call__(self, context: RolloutContext) -> RolloutOutput:
        """Make one step's batch.

        Raises:
            RunFailedError: If the source ends, or too many prompts have been drawn, before the batch is full.
        """
        step = _Step(context)
        step.kept += context.surplus[: context.rollout_batch_size]
        step.surplus += context.surplus[context.rollout_batch_size :]
        await self._submit(step, 0 if step.is_full else self.refill.first - len(step.kept))
        while not step.is_full:
            await self._submit(step, self._refill_count(step))
            if not step.pending:
                step.use_fallback()
                if not step.is_full:
                    raise RunFailedError(step.shortage())
                break
            await self._settle_next(step)
        await context.abort()
        self._settle_rest(step)
        return self._output(step)

    def _refill_count(self, step: _Step) -> int:
        owed, step.owed = step.owed, 0
        below = len(step.kept) + len(step.pending) + owed < self.refill.target
        return owed + (self.refill.chunk if below else 0)

    async def _submit(self, step: _Step, count: int) -> None:
        limit = self.max_draws_per_batch * step.context.rollout_batch_size
        count = min(count, limit - step.num_drawn)
        if count <= 0 or step.source_ended:
            return
        draws = await step.context.draw(count)
        step.num_drawn += len(draws)
        step.source_ended = len(draws) < count
        step.pending += [step.context.submit(draw) for draw in draws]
        if len(step.kept) + len(step.pending) < self.refill.target:
            await self._submit(step, self.refill.chunk)

    async def _settle_next(self, step: _Step) -> None:
        """Wait for the next group that may be decided, and decide all that may be."""
        if self.deterministic:
            await asyncio.wait(step.pending[:1])
            self._settle(step, step.pending[:1])
            return
        finished, _ = await asyncio.wait(step.pending, return_when=asyncio.FIRST_COMPLETED)
        self._settle(step, [task for task in step.pending if task in finished])

    def _settle(self, step: _Step, tasks: Iterable[asyncio.Task[GroupResult]]) -> None:
        for task in list(tasks):
            step.pending.remove(task)
            num_failed = len(step.failed)
            step.settle(task.result())
            if self.group_failure is GroupFailurePolicy.REFILL:
                step.owed += len(step.failed) - num_failed

    def _settle_rest(self, step: _Step) -> None:
        # Which of these finished in time depends on timing, so a deterministic run leaves them to be requeued.
        if not self.deterministic:
            self._settle(step, step.pending)

    def _output(self, step: _Step) -> RolloutOutput:
        keep_surplus = self.surplus is SurplusPolicy.KEEP
        discarded = [] if keep_surplus else step.surplus
        if not self.requeue_aborted:
            discarded = [*discarded, *step.aborted]
        return RolloutOutput(
            groups=tuple(step.kept),
            dropped=tuple(step.dropped),
            failed=tuple(step.failed),
            surplus=tuple(step.surplus) if keep_surplus else (),
            discarded=tuple(discarded),
        )
