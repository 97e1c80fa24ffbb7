"""``[plugins]``: your own functions, by import path."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollfeed.config.section import Section

ImportPath = Annotated[str, Field(min_length=1)]


class PluginSettings(Section):
    """Import paths `module:name`; modules beside the settings file are found; see docs/extending.md."""

    prompt_source: ImportPath | None = None
    """A class or function that makes a `PromptSource` from the model's tokenizer; it replaces `[prompts]`."""
    generate: ImportPath | None = None
    """A `GenerateFn`: answers a prompt once; it is handed the built-in one as `default`."""
    rollout: ImportPath | None = None
    """A `RolloutFn`: makes a whole step."""
    reward: ImportPath | None = None
    """A `RewardFn`: scores one sample, of a data set; see `reward.override_environments`."""
    batched_reward: ImportPath | None = None
    """A `BatchedRewardFn`: scores the samples of a prompt in one call, after all have finished."""
    group_reward: ImportPath | None = None
    """A `GroupRewardFn`: scores a group whole, after all its rollouts have finished."""
    group_filters: tuple[ImportPath, ...] = Field(default=(), strict=False)
    """`GroupFilter`s, applied after those of `[filters]`."""
    batch_filter: ImportPath | None = None
    """A `BatchFilter`: chooses a batch among more groups than it needs; it replaces `filters.over_sampling.name`."""
    sample_hook: ImportPath | None = None
    """A `SampleHook`: sees every finished sample before it is scored."""
    advantage: ImportPath | None = None
    """An `AdvantageFn`: turns the rewards of a group into advantages."""
    buffer_policy: ImportPath | None = None
    """A `BufferPolicy`: chooses which waiting prompts leave the buffer next; it replaces `buffer.policy`."""
    tracker: ImportPath | None = None
    """A class or function that makes a `Tracker`; it is called without arguments."""

    @property
    def has_reward(self) -> bool:
        """Whether a function scores prompts."""
        return any((self.reward, self.batched_reward, self.group_reward))

    @model_validator(mode="after")
    def _one_reward(self) -> PluginSettings:
        given = [name for name in ("reward", "batched_reward", "group_reward") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both score samples: set one of them")
        return self
