"""The default rollout function: one scheduler; what differs between the modes are policies.

Prompts are submitted until the groups that count reach the target; as groups finish, the filter keeps or drops
them; when enough are kept, the batch is chosen, oldest groups first. Then the rest is aborted (``sync``), aborted
and kept (``partial``), or stays in flight (``async``, where a step also begins before somebody waits for its batch).
Where a batch filter chooses, it does so among the oldest groups of a fixed number, and what it leaves out is dropped.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollfeed.config import GroupFailurePolicy, Refill, RolloutMode, RolloutSettings, SurplusPolicy
from rollfeed.errors import PromptsEndedError, RunFailedError
from rollfeed.faults import blaming, complaint, is_own
from rollfeed.pipeline.staleness import StalenessClock
from rollfeed.protocols import AgeRule, BatchFilter, RolloutContext, RunningGroup
from rollfeed.types import OVER_SAMPLED, Discarded, Drop, Dropped, Ending, Failed, Group, Requeued, Surplus, Trained


class OverSampling(NamedTuple):
    """Choosing a batch from more groups than it needs."""

    batch_filter: BatchFilter
    num_extra: int
    """Groups to keep beyond the batch before it is chosen."""


@dataclass(slots=True)
class _Progress:
    """What has become of the step's groups so far."""

    context: RolloutContext
    ready: list[Group] = field(default_factory=list)
    """Kept and not delivered."""
    endings: list[Dropped | Failed] = field(default_factory=list)
    fallback: list[Group] = field(default_factory=list)
    """Dropped, but better than an incomplete batch."""
    aborted: list[Group] = field(default_factory=list)
    num_stale: int = 0
    """Groups that became too old and are answered again."""
    pending: dict[int, RunningGroup] = field(default_factory=dict)
    """Submitted and not yet decided, in submission order."""
    ended: set[int] = field(default_factory=set)
    """Groups, pending or not, that are known to have ended and were not looked at since: of thousands that are pending
    at a time only a few have."""
    versions: dict[int, int | None] = field(default_factory=dict)
    """The oldest trained version of groups that are ready, by index, as far as it was asked for: finding it reads every
    mask, and it is asked for at every turn."""
    weeded: dict[int, int] = field(default_factory=dict)
    """The policy version for which groups that are ready were last found new enough, by index."""
    num_drawn: int = 0
    source_ended: bool = False
    owed: int = 0
    """Groups to submit whatever the refill rule says."""

    def settle(self, group: Group) -> None:
        """Decide what becomes of a group that nothing works on any more."""
        if group.error is not None:
            self.endings.append(Failed(group, group.error))
        elif not group.is_finished:
            self.aborted.append(group)
        elif not isinstance(decision := self.context.decide(group), Drop):
            self.ready.append(group)
        else:
            self.endings.append(Dropped(group, decision.reason))
            if decision.usable:
                self.fallback.append(group)

    def use_fallback(self) -> None:
        """Fill the batch with groups that were dropped but may be used when the step is short."""
        missing = self.context.rollout_batch_size - len(self.ready)
        chosen = sorted(self.fallback, key=lambda group: group.group_index)[:missing]
        indices = {group.group_index for group in chosen}
        self.ready += chosen
        self.endings = [ending for ending in self.endings if ending.group.group_index not in indices]

    def shortage(self) -> str:
        """Say why the batch is short."""
        reasons = Counter(ending.reason for ending in self.endings if isinstance(ending, Dropped))
        causes = [ending.reason for ending in self.endings if isinstance(ending, Failed)]
        told = [f"{count} dropped as {reason}" for reason, count in reasons.most_common(3)]
        told += [f"{self.num_stale} too old"] if self.num_stale else []
        told += [f"{len(causes)} failed, the first one: {causes[0]}"] if causes else []
        why = "the prompt source has ended" if self.source_ended else "rollout.max_draws_per_batch is reached"
        return (
            f"step {self.context.step} has {len(self.ready)} of {self.context.rollout_batch_size} groups after "
            f"{self.num_drawn} prompts and {why} ({'; '.join(told) or 'nothing dropped or failed'})"
        )


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Fits :class:`rollfeed.protocols.RolloutFn`."""

    settings: RolloutSettings
    age_rule: AgeRule
    over_sampling: OverSampling | None = None
    clock: StalenessClock | None = field(init=False, default=None)
    """Paces ``async``; other modes have none."""
    refill: Refill = field(init=False)

    def __post_init__(self) -> None:
        chosen = self.settings
        self.refill = chosen.refill
        if chosen.mode is RolloutMode.ASYNC and chosen.max_staleness is not None:
            num_extra = self.over_sampling.num_extra if self.over_sampling is not None else 0
            self.clock = StalenessClock(
                max_staleness=chosen.max_staleness, groups_per_batch=chosen.rollout_batch_size + num_extra
            )

    async def __call__(self, context: RolloutContext) -> list[Ending]:
        """Make one step's batch.

        Raises:
            PromptsEndedError: If the source ends before the batch is full.
            RunFailedError: If too many prompts have been drawn before.
        """
        step = _Progress(context, ready=list(context.surplus), pending=dict(context.running))
        step.ended = {group_index for group_index, running in step.pending.items() if running.task.done()}
        while not self._is_complete(step):
            for count in self._due_draws(step):
                groups = await context.draw(count)
                step.num_drawn += len(groups)
                step.source_ended = len(groups) < count
                for group in groups:
                    context.submit(group)
                    step.pending[group.group_index] = context.running[group.group_index]
            if not step.pending and context.is_wanted:
                self._complete_from_fallback(step)
                break
            await self._settle_next(step)
        if self.settings.mode is not RolloutMode.ASYNC:
            await context.abort()
            # Which of these finished in time depends on timing, so a deterministic run leaves them to be requeued.
            self._settle(step, [] if self.settings.deterministic else list(step.pending))
        return self._endings(step)

    def _is_complete(self, step: _Progress) -> bool:
        self._weed(step)
        num_candidates = self._num_candidates(step)
        if len(step.ready) < num_candidates:
            return False
        if self.clock is None:
            return True
        if not step.context.is_wanted:
            return False
        left = [self._version(group, step) for group in self._by_age(step)[num_candidates:]]
        running = [each.policy_version for each in step.pending.values()]
        return not self.clock.must_wait(left, running, policy_version=step.context.policy_version)

    def _num_candidates(self, step: _Progress) -> int:
        """Return among how many groups the batch is chosen."""
        num_extra = self.over_sampling.num_extra if self.over_sampling is not None else 0
        return step.context.rollout_batch_size + num_extra

    def _complete_from_fallback(self, step: _Progress) -> None:
        if len(step.ready) < step.context.rollout_batch_size:
            step.use_fallback()
        if len(step.ready) < step.context.rollout_batch_size:
            raise (PromptsEndedError if step.source_ended else RunFailedError)(step.shortage())

    def _due_draws(self, step: _Progress) -> Iterator[int]:
        """Yield how many groups the refill rule and the limits ask for now, one draw at a time."""
        owed, step.owed = step.owed, 0
        if step.num_drawn == 0 and not self._has_batch(step):
            owed = max(owed, self.refill.first - self._num_counted(step))
        if (count := self._within_limits(step, owed)) > 0:
            yield count
        while (
            self._num_counted(step) < self.refill.target and (count := self._within_limits(step, self.refill.chunk)) > 0
        ):
            yield count
        missing = self._num_candidates(step) - len(step.pending) - len(step.ready)
        if self.over_sampling is not None and (count := self._within_limits(step, missing)) > 0:
            yield count

    def _has_batch(self, step: _Progress) -> bool:
        return self.settings.mode is not RolloutMode.ASYNC and len(step.ready) >= step.context.rollout_batch_size

    def _num_counted(self, step: _Progress) -> int:
        return len(step.pending) + (len(step.ready) if self.refill.counts_kept else 0)

    def _within_limits(self, step: _Progress, count: int) -> int:
        """Return how many of ``count`` groups may be submitted now; none if it is not above 0."""
        if step.source_ended:
            return 0
        count = min(count, self.settings.max_draws_per_batch * step.context.rollout_batch_size - step.num_drawn)
        if self.clock is not None:
            self.clock.see(step.context.policy_version)
            most = self.clock.max_live_groups(is_wanted=step.context.is_wanted)
            count = min(count, most - len(step.pending) - len(step.ready))
        return count

    async def _settle_next(self, step: _Progress) -> None:
        """Decide all groups that may be decided; if there is none, wait for one or for another change."""
        if not (due := self._due(step)):
            step.ended.update(await step.context.changed())
            due = self._due(step)
        self._settle(step, due)

    def _due(self, step: _Progress) -> list[int]:
        if not self.settings.deterministic:
            ended, step.ended = step.ended, set()
            return sorted(each for each in ended if each in step.pending and step.pending[each].task.done())
        first = next(iter(step.pending.items()), None)
        return [first[0]] if first is not None and first[1].task.done() else []

    def _settle(self, step: _Progress, group_indices: Iterable[int]) -> None:
        for group_index in group_indices:
            group = step.pending.pop(group_index).task.result()
            step.settle(group)
            if group.error is not None and self.settings.group_failure is GroupFailurePolicy.REFILL:
                step.owed += 1

    def _weed(self, step: _Progress) -> None:
        """Take out what has become too old; what is only to be masked is so when the batch is cut."""
        now = step.context.policy_version
        if self.clock is not None:
            self.clock.see(now)
        unseen = [group for group in step.ready if step.weeded.get(group.group_index) != now]
        if not unseen:
            return
        by_age = self.age_rule(unseen, policy_version=now)
        step.weeded |= {group.group_index: now for group in by_age.fresh}
        gone = {ending.group.group_index for ending in by_age.old}
        for ending in by_age.old:
            if isinstance(ending, Requeued):
                step.context.requeue(ending.group)
                step.versions.pop(ending.group.group_index, None)
                step.num_stale += 1
                step.source_ended = False  # it can be drawn
            else:
                step.endings.append(ending)
        step.ready = [group for group in step.ready if group.group_index not in gone]

    def _version(self, group: Group, step: _Progress) -> int:
        if group.group_index not in step.versions:
            step.versions[group.group_index] = group.oldest_trained_version
        version, now = step.versions[group.group_index], step.context.policy_version
        if version is None:
            return now
        # Tokens that are too old will have lost their weight when the batch is cut.
        return version if self.clock is None else max(version, now - self.clock.max_staleness)

    def _by_age(self, step: _Progress) -> list[Group]:
        """Return the finished groups, those first that must be trained first."""
        if self.clock is not None:
            return sorted(step.ready, key=lambda group: (self._version(group, step), group.group_index))
        return sorted(step.ready, key=lambda group: group.group_index)

    def _endings(self, step: _Progress) -> list[Ending]:
        size, ordered = step.context.rollout_batch_size, self._by_age(step)
        num_candidates = self._num_candidates(step)
        candidates, surplus, chosen = ordered[:num_candidates], ordered[num_candidates:], list(range(size))
        if self.over_sampling is not None:
            chosen = chosen_by(self.over_sampling.batch_filter, candidates, count=size)
        left_out = [candidates[index] for index in sorted(set(range(len(candidates))) - set(chosen))]
        drops_surplus = self.settings.surplus is SurplusPolicy.DROP and self.settings.mode is not RolloutMode.ASYNC
        if self.clock is not None:
            self.clock.cut()
        return [
            *(Trained(candidates[index]) for index in chosen),
            *(Dropped(group, OVER_SAMPLED) for group in left_out),
            *step.endings,
            *(Discarded(group, "surplus") if drops_surplus else Surplus(group) for group in surplus),
            *(Discarded(group, "aborted") for group in step.aborted if not self.settings.requeue_aborted),
        ]


def chosen_by(batch_filter: BatchFilter, candidates: list[Group], *, count: int) -> list[int]:
    """Return the indices of the ``count`` groups that a batch filter puts first."""
    setting = "filters.over_sampling" if is_own(batch_filter) else "plugins.batch_filter"
    with blaming(setting, batch_filter):
        returned: object = batch_filter(candidates)
    try:
        indices = [operator.index(index) for index in returned]  # type: ignore[attr-defined]
    except TypeError:
        told = f"returned {returned!r:.100}; it must return a sequence of indices"
        raise complaint(setting, batch_filter, told) from None
    if len(set(indices)) != len(indices) or not all(0 <= index < len(candidates) for index in indices):
        told = f"returned {indices!r:.100} for {len(candidates)} groups"
        raise complaint(setting, batch_filter, f"{told}; it must return indices of groups, each at most once")
    if len(indices) < count:
        told = f"returned {len(indices)} of {len(candidates)} groups, and a batch has {count}: return at least as many"
        raise complaint(
            setting, batch_filter, f"{told}, best first; what is never to be trained on is for a group filter"
        )
    return indices[:count]
