"""The settings of a rollout manager as Python objects: numbers and plain callables, no file."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, SkipValidation, model_validator

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.buffer import BufferSettings
from rollfeed.config.placement import PlacementSettings
from rollfeed.config.reward import CodeRewardSettings, OverlongSettings, RemoteRewardSettings, WorkerSettings
from rollfeed.config.rollout import RolloutSettings
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.weights import WeightSettings
from rollfeed.protocols import (
    AdvantageFn,
    BatchedRewardFn,
    BatchFilter,
    BufferPolicy,
    GenerateFn,
    GroupFilter,
    GroupRewardFn,
    RewardFn,
    RolloutFn,
    SampleHook,
)


class RolloutConfig(RolloutSettings):
    """What ``rollfeed.open_rollouts`` needs to know; functions may be ``functools.partial``s.

    The fields of ``[rollout]`` are fields here too: ``RolloutConfig(rollout_batch_size=8, reward=score)``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Everything random in the run derives from it."""
    sampling: SamplingSettings = SamplingSettings()
    """How the policy answers."""
    generate: SkipValidation[GenerateFn] | None = None
    """Answers a prompt once; by default a single turn."""
    rollout: SkipValidation[RolloutFn] | None = None
    """Makes a whole step; by default the scheduler."""
    reward: SkipValidation[RewardFn] | None = None
    """Scores one sample."""
    batched_reward: SkipValidation[BatchedRewardFn] | None = None
    """Scores the samples of a prompt in one call."""
    group_reward: SkipValidation[GroupRewardFn] | None = None
    """Scores a group whole."""
    named_rewards: dict[str, SkipValidation[RewardFn]] = Field(default={})
    """Functions that prompts choose with the `reward_fn` of their metadata."""
    rm_type: str | None = Field(default=None, min_length=1)
    """Grader by name, for prompts that bring none of their own."""
    reward_key: str | None = Field(default=None, min_length=1)
    """Which entry of a reward dictionary is the reward."""
    reward_timeout_seconds: float = Field(default=30.0, gt=0.0, le=86_400.0, strict=False)
    """A reward function that takes longer fails its rollout."""
    reward_concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    """Calls of reward functions at once; by default as many async ones as there are samples that wait for a reward."""
    override_environments: bool = False
    """Reward functions score the prompts of environments too, which verify their own otherwise."""
    reward_workers: WorkerSettings = WorkerSettings()
    """Processes that grade what could hang or crash."""
    code_reward: CodeRewardSettings = CodeRewardSettings()
    """Programs and their tests."""
    remote_reward: RemoteRewardSettings = RemoteRewardSettings()
    """The reward server."""
    group_filters: SkipValidation[tuple[GroupFilter, ...]] = ()
    """Applied in order; the first that drops decides."""
    batch_filter: SkipValidation[BatchFilter] | None = None
    """Chooses the batch among more groups than it needs; the others are dropped."""
    num_extra_groups: int | None = Field(default=None, ge=1, le=1_000_000)
    """Groups to have beyond the batch before `batch_filter` chooses; by default all that a step starts with."""
    buffer: BufferSettings = BufferSettings()
    """Prompts that wait to be answered again or gone on with."""
    buffer_policy: SkipValidation[BufferPolicy] | None = None
    """Chooses which of them leave first; it replaces ``buffer.policy``."""
    placement: PlacementSettings = PlacementSettings()
    """Which prompts start first."""
    weights: WeightSettings = WeightSettings()
    """Where new weights come from, other than from ``update_weights``."""
    sample_hook: SkipValidation[SampleHook] | None = None
    """Sees every finished sample before it is scored."""
    advantage: SkipValidation[AdvantageFn] | None = None
    """Turns the rewards of a group into advantages, in place of ``estimator``."""
    estimator: AdvantageSettings = AdvantageSettings()
    """What turns the rewards of a batch into advantages; by default reward minus the group's mean."""
    overlong: OverlongSettings | None = None
    """What long responses lose of their reward before that."""

    @property
    def has_reward_function(self) -> bool:
        """Whether a function scores samples that name none, before any grader."""
        return any((self.reward, self.batched_reward, self.group_reward))

    @model_validator(mode="after")
    def _chooses_among_more(self) -> RolloutConfig:
        if self.batch_filter is not None and not (
            self.num_extra_groups or self.first_submission > self.rollout_batch_size
        ):
            raise ValueError(
                "the batch filter has nothing to choose from: set rollout.over_sampling_batch_size above "
                "rollout_batch_size, or filters.over_sampling.num_extra"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _filters_as_tuple(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("group_filters"), list):
            values = {**values, "group_filters": tuple(values["group_filters"])}
        return values
