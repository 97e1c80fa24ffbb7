"""``[rollout]``: how a step's batch comes about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from rollfeed.config.section import Free, FreeUnlessDeterministic, Resume, Section
from rollfeed.conversations import LossMaskType
from rollfeed.protocols import RewrittenTurns


class RolloutMode(StrEnum):
    """The fate of work that is under way when a batch is complete."""

    SYNC = "sync"
    PARTIAL = "partial"
    ASYNC = "async"
    SFT = "sft"
    """Nothing is sampled: data sets bring the answers."""


DEFAULT_STALENESS: Mapping[object, int] = MappingProxyType(
    {RolloutMode.SYNC: 0, RolloutMode.ASYNC: 4, RolloutMode.SFT: 0}
)
"""`max_staleness` by mode, where it is not set; `partial` has no limit."""


class StalenessPolicy(StrEnum):
    """The fate of a finished group that is too old when a batch is cut."""

    REQUEUE = "requeue"
    MASK = "mask"
    DROP = "drop"


class RefillCounts(StrEnum):
    """The groups that count towards the number that is to be reached."""

    KEPT_AND_IN_FLIGHT = "kept_and_in_flight"
    IN_FLIGHT = "in_flight"


class SurplusPolicy(StrEnum):
    """The fate of groups that finish after the batch is full."""

    KEEP = "keep"
    DROP = "drop"


class GroupFailurePolicy(StrEnum):
    """The fate of a group when one of its rollouts fails."""

    DROP = "drop"
    RETRY = "retry"
    REFILL = "refill"


class Refill(NamedTuple):
    """The moments at which prompts are submitted, and their number."""

    target: int
    """Submit while groups in flight + kept are below this."""
    chunk: int
    """How many at a time, after the first submission."""
    first: int
    """How many a step starts with."""
    counts_kept: bool = True
    """Whether kept groups count; without them engines stay full until the batch is complete."""


_OF_SAMPLING = frozenset(
    {
        "over_sampling_batch_size",
        "over_sampling_factor",
        "refill_granularity",
        "refill_counts",
        "staleness_policy",
        "mask_offpolicy_in_partial_rollout",
        "mask_offpolicy_finished_members",
        "mask_truncated",
        "rewritten_turns",
        "max_requests_in_flight",
        "surplus",
        "requeue_aborted",
    }
)
"""Keys that say what becomes of answers that are sampled."""


class RolloutSettings(Section, resume=Resume.BATCHES):
    """The scheduler."""

    num_rollout: Free[int] = Field(default=10, ge=1, le=100_000_000)
    """Steps in the run; each delivers one batch. There are fewer where the data ends before (`prompts.num_epoch`)."""
    rollout_batch_size: int = Field(default=4, ge=1, le=1_000_000)
    """Groups in a batch."""
    n_samples_per_prompt: int = Field(default=4, ge=1, le=100_000)
    """Rollouts in a group; 1 in `sft` mode."""
    mode: RolloutMode = Field(default=RolloutMode.SYNC, strict=False)
    """What happens when a batch is complete: `sync` aborts what is under way and answers it again, from the beginning;
    `partial` aborts it too, keeps its tokens and goes on from them; `async` lets it go on, between the steps too. With
    `sft` nothing is sampled: conversations of data sets are learned as they stand (docs/training.md).
    """
    loss_mask_type: LossMaskType = Field(default=LossMaskType.GENERIC, strict=False)
    """The assistant's turns that `sft` mode learns. `generic`: all, with any chat template that goes on showing turns
    as they were said; others are refused. `qwen`, `qwen3`: all, as the template shows them at the end, without thoughts
    that it leaves out of earlier ones. `distill_qwen`: the last one.
    """
    over_sampling_batch_size: int | None = Field(default=None, ge=1, le=1_000_000)
    """Prompts submitted at a time, at least `rollout_batch_size`; by default `rollout_batch_size`. More are
    submitted when in flight + kept falls below `rollout_batch_size`.
    """
    over_sampling_factor: float | None = Field(default=None, ge=1.0, le=1000.0, strict=False)
    """The same as a multiple of `rollout_batch_size`, rounded up; set one of the two."""
    refill_granularity: int | None = Field(default=None, ge=1, le=1_000_000)
    """Keep `over_sampling_batch_size` prompts in flight + kept, and replace dropped ones this many at a time (1
    keeps engines fullest); by default a whole `over_sampling_batch_size` at once.
    """
    refill_counts: RefillCounts = Field(default=RefillCounts.KEPT_AND_IN_FLIGHT, strict=False)
    """Which groups the refill counts. `in_flight` leaves out those that are kept already: engines stay full until the
    batch is complete, and more is aborted then. In `async` mode it is always so.
    """
    max_staleness: int | None = Field(default=None, ge=0, le=1_000_000)
    """How many versions the oldest trained token of a batch may be behind the engine, whatever made the batch. By
    default 0 in `sync` and `sft` mode, 4 in `async` mode, and no limit in `partial` mode, where an answer may take many
    steps.
    """
    staleness_policy: StalenessPolicy = Field(default=StalenessPolicy.REQUEUE, strict=False)
    """Groups that are too old when a batch is cut are answered again (`requeue`), trained without their old tokens
    (`mask`; answered again where none would be left), or dropped and counted (`drop`).
    """
    mask_offpolicy_in_partial_rollout: bool = False
    """Tokens of older policy versions get weight 0 when a response is gone on with, and in groups that an earlier step
    finished and kept; those of which nothing would be left are answered again. It is for `partial` mode: in `async`
    mode `staleness_policy = "mask"` masks.
    """
    mask_offpolicy_finished_members: bool = False
    """With `mask_offpolicy_in_partial_rollout`: members that had finished before others of their group were gone on
    with lose the weight of their older tokens, too.
    """
    mask_truncated: bool = False
    """Answers that ended at the limit of their length are not trained on; their rewards count in baselines, and
    `rollout/truncated_masked` counts their samples.
    """
    rewritten_turns: RewrittenTurns = Field(default=RewrittenTurns.FORK, strict=False)
    """How an episode goes on where the chat template shows earlier turns otherwise than they were said, such as without
    their thoughts: what comes then is a sample of its own with the context that the template shows (`fork`), the tokens
    of before are kept (`append`), or the rollout fails (`refuse`).
    """
    max_requests_in_flight: FreeUnlessDeterministic[int | None] = Field(default=None, ge=1, le=1_000_000)
    """Requests at the engine at once; by default twice what the engine works on at once."""
    deterministic: bool = False
    """Same seed, same bytes: groups are committed in submission order, unfinished or surplus ones are answered
    again in the next step, and the embedded engine computes fixed shapes (slower).
    """
    surplus: SurplusPolicy = Field(default=SurplusPolicy.KEEP, strict=False)
    """Groups that finish after the batch is full are kept for the next step, where `max_staleness` allows, or dropped
    and counted. What a batch filter leaves out is always dropped.
    """
    requeue_aborted: bool = True
    """Prompts aborted at the end of a step are answered again in the next one; `false` discards and counts them."""
    group_failure: Free[GroupFailurePolicy] = Field(default=GroupFailurePolicy.DROP, strict=False)
    """When a rollout fails: `drop` its group, `retry` the rollout first, or drop the group and `refill` its place
    at once.
    """
    failure_retries: Free[int] = Field(default=2, ge=1, le=100)
    """Tries after the first one under `group_failure = "retry"`."""
    failure_budget: Free[float] = Field(default=0.1, ge=0.0, le=1.0, strict=False)
    """When more than this share of the last `failure_window` rollouts failed, the run stops with the first cause."""
    failure_window: Free[int] = Field(default=512, ge=1, le=65_536)
    """How many of the last rollouts count, finished and failed ones, those of earlier processes included."""
    failure_minimum: Free[int] = Field(default=16, ge=1, le=65_536)
    """Failures among them from which on the share is looked at; `failure_budget = 0.0` with 1 stops at the first one.
    """
    max_draws_per_batch: Free[int] = Field(default=64, ge=1, le=1_000_000)
    """A step that has drawn this many times `rollout_batch_size` prompts and is still short ends the run with the
    reasons.
    """
    rollout_timeout_seconds: Free[float] = Field(default=900.0, gt=0.0, le=604_800.0, strict=False)
    """A rollout that takes longer fails."""
    abort_grace_seconds: Free[float] = Field(default=10.0, gt=0.0, le=3600.0, strict=False)
    """How long the end of a step waits for aborted work, slow rewards included, before it is cancelled."""
    watchdog_seconds: Free[float] = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """After this long without a finished rollout, say what the step is waiting for; and where the event loop is held up
    for as long, which line does that.
    """

    @field_validator("failure_budget", mode="before")
    @classmethod
    def _is_a_share(cls, value: object) -> object:
        if isinstance(value, int | float) and value > 1:
            raise ValueError(
                f"{value} is a count, and this is a share of the last failure_window rollouts: write 0.1 for a tenth "
                "of them, and set failure_minimum to the number of failures that are never too many"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_mode(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        mode = values.get("mode", RolloutMode.SYNC)
        defaults = {"max_staleness": DEFAULT_STALENESS.get(mode) if isinstance(mode, str) else None}
        return {**defaults, **({"n_samples_per_prompt": 1} if mode == RolloutMode.SFT else {}), **values}

    @model_validator(mode="after")
    def _fits_together(self) -> RolloutSettings:
        if self.over_sampling_batch_size is not None and self.over_sampling_factor is not None:
            raise ValueError("over_sampling_batch_size and over_sampling_factor say the same thing: set one of them")
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            raise ValueError(
                f"over_sampling_batch_size = {self.over_sampling_batch_size} is below rollout_batch_size = "
                f"{self.rollout_batch_size}: raise it, or set refill_granularity for smaller refills"
            )
        if self.refill_granularity is not None and self.refill_granularity > self.first_submission:
            raise ValueError(
                f"refill_granularity = {self.refill_granularity} is above the {self.first_submission} prompts a step "
                "starts with: lower it"
            )
        if self.failure_minimum > self.failure_window:
            raise ValueError(
                f"failure_minimum = {self.failure_minimum} is above failure_window = {self.failure_window}, which "
                "never holds as many failures: lower it, or raise the latter"
            )
        if self.mode is RolloutMode.ASYNC and self.deterministic:
            raise ValueError(
                "deterministic batches need a mode that ends its steps: set rollout.mode to sync or partial, or "
                "deterministic = false"
            )
        if self.mode is RolloutMode.ASYNC and self.max_staleness is None:
            raise ValueError("rollout.mode = async is paced by max_staleness: set a number")
        if self.mask_offpolicy_finished_members and not self.mask_offpolicy_in_partial_rollout:
            raise ValueError(
                "mask_offpolicy_finished_members extends mask_offpolicy_in_partial_rollout: set that to true as well"
            )
        if self.mode is not RolloutMode.SYNC and not self.requeue_aborted:
            raise ValueError(f"rollout.mode = {self.mode} keeps what was aborted: remove requeue_aborted = false")
        return self

    @model_validator(mode="after")
    def _answers_are_sampled_or_given(self) -> RolloutSettings:
        is_sft = self.mode is RolloutMode.SFT
        if is_sft and self.n_samples_per_prompt not in (1, 2):  # a pair, where a reward model is trained
            raise ValueError(
                f"n_samples_per_prompt = {self.n_samples_per_prompt}: a conversation has one answer with mode = 'sft': "
                "set it to 1, or remove it"
            )
        for name, value in self.changed_values().items():
            if (is_sft and name in _OF_SAMPLING) or (not is_sft and name == "loss_mask_type"):
                raise ValueError(f"{name} = {value} has no effect with mode = {self.mode.value!r}: remove it")
        return self

    @property
    def first_submission(self) -> int:
        """Prompts a step starts with, when nothing is left over from the last one."""
        if self.over_sampling_factor is not None:
            return math.ceil(self.over_sampling_factor * self.rollout_batch_size)
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def refill(self) -> Refill:
        """The submission rule that these settings describe."""
        first, is_async = self.first_submission, self.mode is RolloutMode.ASYNC
        counts_kept = not is_async and self.refill_counts is RefillCounts.KEPT_AND_IN_FLIGHT
        if self.refill_granularity is None and not is_async:
            return Refill(target=self.rollout_batch_size, chunk=first, first=first, counts_kept=counts_kept)
        return Refill(target=first, chunk=self.refill_granularity or 1, first=first, counts_kept=counts_kept)
