"""Replays the committed steps of a run: reads them, has them decided again, and compares what came of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from rollfeed.app.build import Functions, load_functions
from rollfeed.app.checks import check_combination
from rollfeed.app.replay.allowed import check_groups, check_overrides, check_purity
from rollfeed.app.replay.deciding import Decided, StoredGroup, decide_again
from rollfeed.app.stored_run import stored_spec
from rollfeed.config import Settings
from rollfeed.config.agent import AgentSettings
from rollfeed.config.tools import ToolSettings
from rollfeed.store import RunReader
from rollfeed.store.layout import BATCHES
from rollfeed.store.tables.parquet import batch_table, dropped_table, write_table
from rollfeed.types import Dropped, Group, SampleStatus, TrainBatch

_MASKED = "rollout/truncated_masked"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """One step as it was and as it is after a replay."""

    step: int
    identical: bool
    """Whether batch and dropped groups have the same bytes as before, and the batch the same metrics."""
    num_rollouts: int
    """Of kept and dropped groups."""
    rewards_changed: int
    """Rollouts whose reward is another; one that cannot be scored counts."""
    reward_before: float
    """Mean over these rollouts."""
    reward_now: float | None
    """None where none can be scored."""
    kept_before: int
    """Groups in the batch."""
    kept_now: int
    num_surplus: int
    """Groups that are kept now and are more than the batch takes: those of the highest indices."""
    entered: tuple[int, ...]
    """Indices of groups that are in the batch now only."""
    left: tuple[int, ...]
    """Indices of groups that were in it only."""
    dropped_before: Mapping[str, int]
    """Groups by reason."""
    dropped_now: Mapping[str, int]
    advantages_changed: int
    """Samples that are in both batches with other advantages."""
    trained_tokens_before: int
    """Response tokens with weight in the batch."""
    trained_tokens_now: int
    failures: tuple[str, ...]
    """Why groups cannot be scored."""
    batch: TrainBatch | None
    """None where no group is kept."""


async def replay_run(
    directory: str | Path, overrides: Sequence[str] = (), *, step: int | None = None
) -> AsyncIterator[StepReplay]:
    """Do again what a run did with its answers, with ``key=value`` overrides, and yield what came of each step.

    Nothing is written, and no model is loaded.

    With ``step`` it is that one alone.

    Raises:
        ConfigError: If there is no such run or step, it is damaged, a setting is wrong or has no effect here, or
            rewards are not pure.
        RunFailedError: If a function of the user's raises where that is no failed reward.
    """
    spec = stored_spec(directory, overrides)
    check_overrides(overrides, spec.settings)
    settings, before = spec.settings, stored_spec(directory).settings
    check_combination(settings)
    check_purity(settings, spec.folders)
    without = {"tools": ToolSettings(), "agent": AgentSettings()}  # what answers may start processes
    functions = load_functions(settings.model_copy(update=without), folders=spec.folders)
    with RunReader(directory) as reader:
        steps = [record.step for record in reader.steps()] if step is None else [reader.step(step).step]
        async with functions.services:
            for each in steps:
                yield await _replay_step(reader, each, settings=settings, before=before, functions=functions)


async def _replay_step(
    reader: RunReader, step: int, *, settings: Settings, before: Settings, functions: Functions
) -> StepReplay:
    batch, dropped = reader.batch(step), reader.dropped(step)
    stored = [*(StoredGroup(group, None) for group in batch.groups)]
    stored += [StoredGroup(each.group, each.reason) for each in dropped]
    stored.sort(key=lambda each: each.group.group_index)
    check_groups((each.group for each in stored), settings)
    masked = before.rollout.mask_truncated and _num_masked(batch) == batch.metrics.get(_MASKED)
    decided = await decide_again(stored, batch=batch, functions=functions, settings=settings, masked=masked)
    keys = (before.reward.reward_key, settings.reward.reward_key)
    same = _is_same(reader, batch, dropped, decided, keys)
    return _comparison(batch, dropped, decided, identical=same, keys=keys)


def _num_masked(batch: TrainBatch) -> int:
    return sum(
        sample.remove_sample
        for group in batch.groups
        for rollout in group.rollouts
        for sample in rollout.samples
        if SampleStatus.TRUNCATED in (rollout.status, sample.status)
    )


def _is_same(
    reader: RunReader,
    batch: TrainBatch,
    dropped: Sequence[Dropped],
    decided: Decided,
    keys: tuple[str | None, str | None],
) -> bool:
    new = decided.batch
    # Runs of before have fewer metrics.
    had, have = ({} if new is None else new.metrics), batch.metrics
    if new is None or decided.surplus or any(not _equal(have[name], had[name]) for name in had.keys() & have.keys()):
        return False
    key_before, key_now = keys
    encoded = _bytes(batch_table(new, reward_key=key_now))
    # Another version of the library that writes the files may write the same batch otherwise.
    file = reader.file(BATCHES, batch.step)
    if encoded != file.read_bytes() and encoded != _bytes(batch_table(batch, reward_key=key_before)):
        return False
    about = {"step": batch.step, "policy_version": batch.policy_version}
    tables = (
        dropped_table(groups, reward_key=key, **about)
        for groups, key in ((dropped, key_before), (decided.dropped, key_now))
    )
    return len(dropped) == len(decided.dropped) and len({_bytes(table) for table in tables}) == 1


def _bytes(table: Any) -> bytes:
    file = BytesIO()
    write_table(table, file)
    return file.getvalue()


def _equal(before: float | None, now: float) -> bool:
    return before == now or (before is not None and math.isnan(before) and math.isnan(now))


def _comparison(
    batch: TrainBatch,
    dropped: Sequence[Dropped],
    decided: Decided,
    *,
    identical: bool,
    keys: tuple[str | None, str | None],
) -> StepReplay:
    new = decided.batch
    kept_now = () if new is None else new.groups
    old_rewards = _rewards([*batch.groups, *(each.group for each in dropped)], keys[0])
    new_rewards = _rewards([*kept_now, *(each.group for each in decided.dropped), *decided.surplus], keys[1])
    indices, indices_now = ({group.group_index for group in groups} for groups in (batch.groups, kept_now))
    old_advantages, new_advantages = _advantages(batch), {} if new is None else _advantages(new)
    scored = [reward for reward in new_rewards.values() if reward is not None]
    found = [reward for reward in old_rewards.values() if reward is not None]
    return StepReplay(
        step=batch.step,
        identical=identical,
        num_rollouts=len(old_rewards),
        rewards_changed=sum(new_rewards.get(key) != reward for key, reward in old_rewards.items()),
        reward_before=float(np.mean(found)),
        reward_now=float(np.mean(scored)) if scored else None,
        kept_before=len(batch.groups),
        kept_now=len(kept_now),
        num_surplus=len(decided.surplus),
        entered=tuple(sorted(indices_now - indices)),
        left=tuple(sorted(indices - indices_now)),
        dropped_before=Counter(each.reason for each in dropped),
        dropped_now=Counter(each.reason for each in decided.dropped),
        advantages_changed=sum(
            not np.array_equal(old_advantages[key], new_advantages[key])
            for key in old_advantages.keys() & new_advantages.keys()
        ),
        trained_tokens_before=_trained_tokens(batch.groups),
        trained_tokens_now=_trained_tokens(kept_now),
        failures=decided.failures,
        batch=new,
    )


def _rewards(groups: Sequence[Group], reward_key: str | None) -> dict[tuple[int, int], float | None]:
    """Return the reward of every rollout, by group and place; None where it has none."""
    return {
        (group.group_index, place): rollout.get_reward_value(reward_key) if rollout.is_scored else None
        for group in groups
        for place, rollout in enumerate(group.rollouts)
    }


def _advantages(batch: TrainBatch) -> dict[tuple[int, int], Any]:
    """Return what each sample is trained with, by group and place in it."""
    places = [(group.group_index, place) for group in batch.groups for place in range(len(group.samples))]
    return dict(zip(places, batch.advantages_S, strict=True))


def _trained_tokens(groups: Sequence[Group]) -> int:
    return sum(group.trained_tokens for group in groups)
