"""Scores, keeps or drops the groups of a step again, and cuts their batch, as the run does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollfeed.app.build import Functions
from rollfeed.app.teaching import scorer_of
from rollfeed.config import RolloutMode, Settings
from rollfeed.pipeline.scheduler import Scheduler, chosen_by
from rollfeed.protocols import Scorer
from rollfeed.rewards.results import GIVEN_WITH_ANSWER
from rollfeed.types import (
    OVER_SAMPLED,
    STALE,
    BatchCut,
    Correct,
    Drop,
    Dropped,
    Group,
    Rollout,
    SampleStatus,
    TrainBatch,
)

FAILED = "failed"
"""The reason of a group that is dropped in a replay as a rollout of it cannot be scored."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of a step, and what became of it."""

    group: Group
    drop_reason: str | None
    """None when it was kept."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The groups of a step after a replay."""

    batch: TrainBatch | None
    """None where no group is kept."""
    dropped: tuple[Dropped, ...]
    surplus: tuple[Group, ...]
    """Kept groups beyond the batch."""
    failures: tuple[str, ...]
    """Why groups could not be scored."""


async def scored_again(group: Group, scorer: Scorer) -> Group:
    """Return a finished group with new verdicts; a reward that came with its answer is kept."""
    rollouts = [each if _is_given(each) else _unscored(each) for each in group.rollouts]
    verdicts = await scorer.score(rollouts, group.prompt)
    scored = [
        rollout if rollout.is_scored else rollout.with_reward(verdict)
        for rollout, verdict in zip(rollouts, verdicts, strict=True)
    ]
    failed = [
        replace(rollout, error=f"prompt {group.prompt.prompt_id}: {rollout.verdict.detail}")
        if rollout.verdict is not None and not rollout.is_scored
        else rollout
        for rollout in scored
    ]
    return replace(group, rollouts=tuple(failed))


def _is_given(rollout: Rollout) -> bool:
    is_said = rollout.verdict is not None and rollout.verdict.detail == GIVEN_WITH_ANSWER
    return is_said or any(sample.reward != rollout.samples[0].reward for sample in rollout.samples)


def _unscored(rollout: Rollout) -> Rollout:
    samples = [replace(sample, reward=None, correct=Correct.UNDEFINED) for sample in rollout.samples]
    return replace(rollout, samples=tuple(samples), verdict=None)


async def decide_again(
    stored: Sequence[StoredGroup], *, batch: TrainBatch, functions: Functions, settings: Settings, masked: bool
) -> Decided:
    """Return what becomes of the groups of a step, in the order of their indices.

    Groups that were too old stay dropped, and those of a rollout function of the user's stay what it made them.

    ``masked`` says whether ``rollout.mask_truncated`` has removed samples from the loss, which is taken back first.
    """
    groups = [_unmasked(each.group) if masked and each.drop_reason is None else each.group for each in stored]
    is_again = [all(rollout.has_finished for rollout in group.rollouts) for group in groups]
    scorer = scorer_of(settings, functions.scorer)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(scored_again(group, scorer)) if again else None
            for group, again in zip(groups, is_again, strict=True)
        ]
    step = _Step()
    for each, group, task in zip(stored, groups, running, strict=True):
        scored = group if task is None else task.result()
        keeps_ending = settings.plugins.rollout is not None or task is None or each.drop_reason == STALE
        if keeps_ending and scored.error is None:
            step.keep_ending(scored, each.drop_reason)
        else:
            step.settle(scored, functions)
    return step.cut(batch, functions=functions, settings=settings)


class _Step:
    """What has become of a step's groups so far."""

    def __init__(self) -> None:
        self.ready: list[Group] = []
        self.dropped: list[Dropped] = []
        self.fallback: list[Group] = []
        self.failures: list[str] = []

    def keep_ending(self, group: Group, drop_reason: str | None) -> None:
        """Leave a group kept or dropped as it was."""
        if drop_reason is None:
            self.ready.append(group)
        else:
            self.dropped.append(Dropped(group, drop_reason))

    def settle(self, group: Group, functions: Functions) -> None:
        """Keep or drop a group as the filters say, or drop one that cannot be scored."""
        if group.error is not None:
            self.failures.append(group.error)
            self.dropped.append(Dropped(group, FAILED))
        elif not isinstance(decision := functions.group_filter(group.samples), Drop):
            self.ready.append(group)
        else:
            self.dropped.append(Dropped(group, decision.reason))
            if decision.usable:
                self.fallback.append(group)

    def cut(self, batch: TrainBatch, *, functions: Functions, settings: Settings) -> Decided:
        """Choose the batch among what is ready, as the scheduler does, and cut it."""
        size, scheduler = len(batch.groups), functions.rollout
        over_sampling = scheduler.over_sampling if isinstance(scheduler, Scheduler) else None
        if settings.rollout.mode is RolloutMode.ASYNC:
            self.ready.sort(key=lambda group: (_version(group, batch, settings), group.group_index))
        num_candidates = size + (0 if over_sampling is None else over_sampling.num_extra)
        candidates, surplus = self.ready[:num_candidates], self.ready[num_candidates:]
        kept = candidates
        if over_sampling is not None and candidates:
            chosen = chosen_by(over_sampling.batch_filter, candidates, count=min(size, len(candidates)))
            kept = [candidates[index] for index in chosen]
            left = sorted(set(range(len(candidates))) - set(chosen))
            self.dropped += [Dropped(candidates[index], OVER_SAMPLED) for index in left]
        filled = self.fallback[: max(0, size - len(kept))]
        indices = {group.group_index for group in filled}
        self.dropped = [each for each in self.dropped if each.group.group_index not in indices]
        new = self._cut([*kept, *filled], batch, functions)
        dropped = sorted(self.dropped, key=lambda each: each.group.group_index)
        return Decided(new, tuple(dropped), tuple(surplus), tuple(self.failures))

    def _cut(self, groups: list[Group], batch: TrainBatch, functions: Functions) -> TrainBatch | None:
        while groups:
            cut = functions.cut_batch(groups, step=batch.step, policy_version=batch.policy_version)
            if isinstance(cut, BatchCut):
                return cut.batch
            self.dropped += [Dropped(each.group, STALE) for each in cut.old]
            groups = list(cut.fresh)
        return None


def _version(group: Group, batch: TrainBatch, settings: Settings) -> int:
    """Return how old a group is, as the scheduler of asynchronous steps orders them."""
    now, oldest, limit = batch.policy_version, group.oldest_trained_version, settings.rollout.max_staleness
    if oldest is None:
        return now
    return oldest if limit is None else max(oldest, now - limit)


def _unmasked(group: Group) -> Group:
    """Return the group with the samples of truncated answers in the loss again."""

    def whole(rollout: Rollout) -> Rollout:
        is_cut = rollout.status is SampleStatus.TRUNCATED
        samples = [
            replace(each, remove_sample=False) if is_cut or each.status is SampleStatus.TRUNCATED else each
            for each in rollout.samples
        ]
        return replace(rollout, samples=tuple(samples))

    return replace(group, rollouts=tuple(map(whole, group.rollouts)))
