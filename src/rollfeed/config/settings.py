"""The root of the settings tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator

from rollfeed.config.advantage import AdvantageSettings
from rollfeed.config.buffer import BufferSettings
from rollfeed.config.engine import EngineSettings
from rollfeed.config.evaluation import EvalSettings
from rollfeed.config.filters import FiltersSettings
from rollfeed.config.method import advantage_of, as_method
from rollfeed.config.model import ModelSettings
from rollfeed.config.placement import PlacementSettings
from rollfeed.config.plugins import PluginSettings
from rollfeed.config.prompts import PromptSettings
from rollfeed.config.resuming import Change, change_of
from rollfeed.config.reward import RewardSettings
from rollfeed.config.rollout import RolloutMode, RolloutSettings
from rollfeed.config.sampling import SamplingSettings
from rollfeed.config.section import Section
from rollfeed.config.train import Correction, OldLogprobs, TrainSettings
from rollfeed.config.weights import WeightSettings


class Settings(Section):
    """A whole run, as one frozen tree."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Everything random in the run derives from it."""
    model: ModelSettings = ModelSettings()
    prompts: PromptSettings = PromptSettings()
    rollout: RolloutSettings = RolloutSettings()
    buffer: BufferSettings = BufferSettings()
    placement: PlacementSettings = PlacementSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    weights: WeightSettings = WeightSettings()
    reward: RewardSettings = RewardSettings()
    filters: FiltersSettings = FiltersSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    train: TrainSettings = TrainSettings()
    plugins: PluginSettings = PluginSettings()
    eval: EvalSettings = EvalSettings()

    @model_validator(mode="before")
    @classmethod
    def _advantage_of_method(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        train, plugins, given = (values.get(name, {}) for name in ("train", "plugins", "advantage"))
        method = as_method(train.get("method") if isinstance(train, Mapping) else getattr(train, "method", None))
        own = plugins.get("advantage") if isinstance(plugins, Mapping) else getattr(plugins, "advantage", None)
        if method is None or own is not None or not isinstance(given, Mapping):
            return values
        return {**values, "advantage": advantage_of(method, given)}

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        for problem in self._problems():
            raise ValueError(problem)
        loss = self.train.loss
        if "correction" not in loss.model_fields_set:
            loss = loss.model_copy(update={"correction": self._default_correction()})
            # The sections are frozen, and this one depends on others.
            object.__setattr__(self, "train", self.train.model_copy(update={"loss": loss}))
        return self

    def _default_correction(self) -> Correction:
        is_stale = self.rollout.mode is not RolloutMode.SYNC
        is_comparable = not self.sampling.restrictions and self.train.loss.old_logprobs is OldLogprobs.TRAINER
        return Correction.TRUNCATE if is_stale and is_comparable else Correction.NONE

    def _problems(self) -> Iterator[str]:
        plugins, prompts = self.plugins, self.prompts
        if not (prompts.datasets or prompts.environments or plugins.prompt_source or self.eval.has_sets):
            yield "no prompts: add [[prompts.environments]], [[prompts.datasets]] or plugins.prompt_source"
        if plugins.prompt_source and (prompts.datasets or prompts.environments):
            yield "plugins.prompt_source replaces [prompts]: remove one of them"
        if plugins.advantage and self.advantage != AdvantageSettings():
            yield f"plugins.advantage = {plugins.advantage!r} replaces [advantage]: remove one of them"
        overlong = self.reward.overlong
        if overlong and overlong.cache > (limit := overlong.length or self.sampling.rollout_max_response_len):
            yield f"reward.overlong.cache = {overlong.cache} is above the {limit} tokens that it is part of: lower it"
        if self.sampling.return_sampling_mask and self.engine.openai is not None:
            yield "sampling.return_sampling_mask: servers of [engine.openai] return none: set it to false"
        over_sampling = self.filters.over_sampling
        if plugins.batch_filter and over_sampling is not None and (over_sampling.name or over_sampling.parameters):
            yield "plugins.batch_filter replaces filters.over_sampling: remove one, or leave only num_extra there"
        if over_sampling is not None and not (over_sampling.name or plugins.batch_filter):
            yield "filters.over_sampling has no filter: set its name, or plugins.batch_filter"
        if self.max_context_length > self.engine.context_length:
            yield (
                f"sampling.rollout_max_context_len = {self.max_context_length} is above engine.context_length = "
                f"{self.engine.context_length}: raise the latter"
            )
        if self.max_prompt_length < 1:
            yield (
                f"sampling.rollout_max_response_len = {self.sampling.rollout_max_response_len} leaves no room for a "
                f"prompt in engine.context_length = {self.engine.context_length}: raise the latter"
            )
        elif self.max_prompt_length + self.sampling.rollout_max_response_len > self.max_context_length:
            yield (
                f"prompts.rollout_max_prompt_len = {self.max_prompt_length} and sampling.rollout_max_response_len = "
                f"{self.sampling.rollout_max_response_len} do not fit into {self.max_context_length} tokens: "
                "lower one of them, or raise engine.context_length"
            )

    @property
    def trains(self) -> bool:
        """Whether there is a ``[train]``: these are settings of a training, too."""
        return "train" in self.model_fields_set

    @property
    def max_context_length(self) -> int:
        """Tokens of prompt and response together."""
        return self.sampling.rollout_max_context_len or self.engine.context_length

    @property
    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt that is answered."""
        given = self.prompts.rollout_max_prompt_len
        return given if given is not None else self.max_context_length - self.sampling.rollout_max_response_len

    def identity(self) -> dict[str, Any]:
        """Return the settings that a run does not change unnoticed while it is gone on with, as dotted keys."""
        flat = flatten(self.model_dump(mode="json"))
        if self.reward.override_environments or not (self.prompts.environments and self.plugins.has_reward):
            del flat["reward.override_environments"]  # as in runs of before, which have no such key
        is_deterministic = self.rollout.deterministic
        return {
            key: value
            for key, value in flat.items()
            if change_of(key, deterministic=is_deterministic) is not Change.FREE
        }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
