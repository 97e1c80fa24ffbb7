"""Data that ends: how many batches it is, and what is said when it has."""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.config import RolloutConfig, Settings, StalenessPolicy, SurplusPolicy
from rollfeed.errors import ConfigError, PromptsEndedError
from rollfeed.pipeline import Rollouts
from rollfeed.prompts import MixtureSource
from rollfeed.protocols import PromptSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLimit:
    """How many batches a source that ends is good for."""

    num_prompts: int
    """Of one epoch."""
    num_epoch: int
    rollout_batch_size: int
    fewest: int
    """Batches, where filters drop nothing but what was drawn too much."""
    is_sure: bool
    """Whether there are at least as many; else filters decide."""

    @property
    def most(self) -> int:
        """Batches if every prompt is trained on."""
        return self.num_prompts * self.num_epoch // self.rollout_batch_size

    def describe(self, num_rollout: int) -> str:
        """Return what there is, and where a run of ``num_rollout`` batches ends."""
        have = f"{self.most} batches" if self.most != 1 else "1 batch"
        if not self.is_sure:
            have = f"at most {have}"
        elif self.fewest < self.most:
            have = f"{self.fewest} to {have}"
        text = (
            f"{self.num_prompts} prompt{'s' * (self.num_prompts != 1)} x {self.num_epoch} "
            f"epoch{'s' * (self.num_epoch != 1)} are {have} of {self.rollout_batch_size}"
        )
        if self.most < num_rollout:
            after = have.removesuffix(" batches").removesuffix(" batch")
            return f"{text}; num_rollout = {num_rollout}: the run ends after {after}"
        if not self.is_sure or self.fewest < num_rollout:
            return f"{text}; num_rollout = {num_rollout}: the run may end before"
        return text


def data_limit(source: PromptSource, settings: Settings, config: RolloutConfig) -> DataLimit | None:
    """Return what a run's data is good for; None where it does not end, or nobody knows.

    Raises:
        ConfigError: If it fills not even one batch.
    """
    num_epoch = settings.prompts.num_epoch
    num_prompts = source.num_prompts if isinstance(source, MixtureSource) else None
    if num_prompts is None or num_epoch is None:
        return None
    size, total = config.rollout_batch_size, num_prompts * num_epoch
    limit = DataLimit(
        num_prompts=num_prompts,
        num_epoch=num_epoch,
        rollout_batch_size=size,
        fewest=total // _most_used(config),
        is_sure=not _may_drop(config),
    )
    if limit.most == 0:
        raise ConfigError(
            f"prompts.num_epoch = {num_epoch}: {num_prompts} prompts x {num_epoch} fill no batch of "
            f"rollout.rollout_batch_size = {size}: lower the latter, or raise or remove the former"
        )
    return limit


def early_end(ended: PromptsEndedError, rollouts: Rollouts, *, num_rollout: int) -> str:
    """Return the line that says why a run has fewer batches than it was asked for.

    Raises:
        PromptsEndedError: If it has none at all.
    """
    if rollouts.next_step == 0:
        raise ended
    counts = rollouts.ledger
    num_left = counts.requeued + counts.surplus + counts.in_flight
    num_batches = f"{rollouts.next_step} batch{'es' * (rollouts.next_step != 1)}"
    left = f"; prompts left over: {num_left} ({ended})" if num_left else ""
    return f"the data ended after {num_batches}; {num_rollout} were asked for{left}"


def _most_used(config: RolloutConfig) -> int:
    """Return how many prompts a batch uses up at most, what filters drop aside."""
    size = config.rollout_batch_size
    chosen_from = size if config.batch_filter is None else size + (config.num_extra_groups or 0)
    throws_away = config.surplus is SurplusPolicy.DROP or not config.requeue_aborted or config.batch_filter is not None
    return max(chosen_from, config.first_submission) if throws_away else size


def _may_drop(config: RolloutConfig) -> bool:
    is_dropped_by_age = config.max_staleness is not None and config.staleness_policy is StalenessPolicy.DROP
    return bool(config.group_filters) or config.rollout is not None or is_dropped_by_age
