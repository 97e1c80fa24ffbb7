"""Data that ends: how many batches it is."""

from __future__ import annotations

from dataclasses import dataclass

from rollfeed.config import Settings, StalenessPolicy, SurplusPolicy
from rollfeed.errors import ConfigError
from rollfeed.prompts.mixture import MixtureSource
from rollfeed.protocols import PromptSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLimit:
    """The batches that a source that ends is good for."""

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


def data_limit(source: PromptSource, settings: Settings) -> DataLimit | None:
    """Return what a run's data is good for; None where it does not end, or nobody knows.

    Raises:
        ConfigError: If it fills not even one batch.
    """
    num_epoch = settings.prompts.num_epoch
    num_prompts = source.num_prompts if isinstance(source, MixtureSource) else None
    if num_prompts is None or num_epoch is None:
        return None
    size, total = settings.rollout.rollout_batch_size, num_prompts * num_epoch
    limit = DataLimit(
        num_prompts=num_prompts,
        num_epoch=num_epoch,
        rollout_batch_size=size,
        fewest=total // _most_used(settings),
        is_sure=not _may_drop(settings),
    )
    if limit.most == 0:
        raise ConfigError(
            f"prompts.num_epoch = {num_epoch}: {num_prompts} prompts x {num_epoch} fill no batch of "
            f"rollout.rollout_batch_size = {size}: lower the latter, or raise or remove the former"
        )
    return limit


def _most_used(settings: Settings) -> int:
    """Return how many prompts a batch uses up at most, what filters drop aside."""
    rollout, size = settings.rollout, settings.rollout.rollout_batch_size
    is_chosen = settings.plugins.batch_filter is not None or settings.filters.over_sampling is not None
    if not (is_chosen or rollout.surplus is SurplusPolicy.DROP or not rollout.requeue_aborted):
        return size
    return max(size + settings.num_extra_groups if is_chosen else size, rollout.first_submission)


def _may_drop(settings: Settings) -> bool:
    rollout, plugins = settings.rollout, settings.plugins
    is_dropped_by_age = rollout.max_staleness is not None and rollout.staleness_policy is StalenessPolicy.DROP
    is_filtered = bool(plugins.group_filters or settings.filters.dynamic_sampling)
    is_adaptive = any(dataset.adaptive for dataset in settings.prompts.datasets)
    return is_filtered or plugins.rollout is not None or is_dropped_by_age or is_adaptive
