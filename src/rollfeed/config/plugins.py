"""``[plugins]``: your own functions, by import path, or themselves where the library is used directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, JsonValue, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from rollfeed.config.section import Resume, Section
from rollfeed.faults import name_of
from rollfeed.protocols import (
    AdvantageFn,
    BatchedRewardFn,
    BatchFilter,
    BufferPolicy,
    DifficultyPolicy,
    GenerateFn,
    GroupFilter,
    GroupRewardFn,
    PromptSource,
    RewardFn,
    RolloutFn,
    SampleHook,
    Tokenizer,
    Tracker,
)

T = TypeVar("T")


def import_path_of(function: Any) -> str:
    """Return ``module:name`` of a function, of what a partial calls, or of an object's class; a path as it is."""
    return function if isinstance(function, str) else name_of(function)


def _path_or_function(given: Any, check_path: ValidatorFunctionWrapHandler) -> Any:
    return given if callable(given) else check_path(given)


if TYPE_CHECKING:
    Plugin: TypeAlias = str | T
    """An import path ``module:name`` or ``file.py:name``, or what it would name."""
else:

    class Plugin:
        """An import path ``module:name`` or ``file.py:name``, or what it would name; stored as the former."""

        def __class_getitem__(cls, _protocol: Any) -> Any:
            path = Annotated[str, Field(min_length=1)]
            return Annotated[path, WrapValidator(_path_or_function), PlainSerializer(import_path_of, when_used="json")]


class PluginSettings(Section, resume=Resume.BATCHES):
    """Paths `module:name` or `file.py:name`; what lies beside the settings file is found; see docs/extending.md.

    `slime:module.name` names a function that is written for slime; see docs/slime-plugins.md.
    """

    prompt_source: Annotated[Plugin[Callable[[Tokenizer], PromptSource]] | None, Resume.PROMPTS] = None
    """A class or function that makes a `PromptSource` from the model's tokenizer; it replaces `[prompts]`."""
    generate: Annotated[Plugin[GenerateFn] | None, Resume.ANSWERS] = None
    """A `GenerateFn`: answers a prompt once; `services.default`, which it is handed, is the built-in one."""
    rollout: Annotated[Plugin[RolloutFn] | None, Resume.ANSWERS] = None
    """A `RolloutFn`: makes a whole step."""
    reward: Annotated[Plugin[RewardFn] | None, Resume.REWARDS] = None
    """A `RewardFn`: scores one sample, of a data set; see `reward.override_environments`."""
    batched_reward: Annotated[Plugin[BatchedRewardFn] | None, Resume.REWARDS] = None
    """A `BatchedRewardFn`: scores the samples of a prompt in one call, after all have finished."""
    group_reward: Annotated[Plugin[GroupRewardFn] | None, Resume.REWARDS] = None
    """A `GroupRewardFn`: scores a group whole, after all its rollouts have finished."""
    group_filters: tuple[Plugin[GroupFilter], ...] = Field(default=(), strict=False)
    """`GroupFilter`s, applied after those of `[filters]`."""
    batch_filter: Plugin[BatchFilter] | None = None
    """A `BatchFilter`: chooses a batch among more groups than it needs; it replaces `filters.over_sampling.name`."""
    sample_hook: Annotated[Plugin[SampleHook] | None, Resume.ANSWERS] = None
    """A `SampleHook`: sees every finished sample before it is scored."""
    advantage: Annotated[Plugin[AdvantageFn] | None, Resume.REWARDS] = None
    """An `AdvantageFn`: turns the rewards of a group into advantages."""
    buffer_policy: Plugin[BufferPolicy] | None = None
    """A `BufferPolicy`: chooses which waiting prompts leave the buffer next; it replaces `buffer.policy`."""
    difficulty_policy: Annotated[Plugin[Callable[..., DifficultyPolicy]] | None, Resume.PROMPTS] = None
    """A class or function that makes the `DifficultyPolicy` of an environment, called with the initial level and the
    number of levels in the window; it replaces `prompts.adaptive.policy`.
    """
    tracker: Annotated[Plugin[Callable[[], Tracker]] | None, Resume.FREE] = None
    """A class or function that makes a `Tracker`; it is called without arguments."""

    slime_args: dict[str, JsonValue] = Field(default={})
    """Further arguments that plug-ins of slime read, by name; see docs/slime-plugins.md."""

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
