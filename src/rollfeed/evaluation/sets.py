"""A set that is measured on: its prompts and its plan, fixed before anything is asked.

A set's own keys come before the defaults of all sets, and these before those of training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollfeed.config import EvalKeys, SamplingSettings
from rollfeed.config.prompts import asking_problem
from rollfeed.errors import ConfigError
from rollfeed.protocols import AnswerMarker, PromptPreprocessor
from rollfeed.seeds import derive_seed
from rollfeed.types import Group, Prompt, SamplingParams

DEFAULT_NUM_PROBLEMS = 100
"""Of an environment: their accuracy is known to about 10 percentage points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDefaults:
    """Settings of training, which hold for a set where it says nothing."""

    sampling: SamplingSettings
    n_samples_per_prompt: int
    rm_type: str | None
    reward_key: str | None
    context_length: int
    """Tokens that the engine takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlan:
    """The way in which the prompts of one set are answered and scored."""

    n_samples_per_prompt: int
    params: SamplingParams
    """Without a seed; each answer gets its own."""
    max_context_length: int
    max_prompt_length: int
    num_prompts: int | None
    """None takes all there are."""
    rm_type: str | None
    has_own_grader: bool
    """Whether evaluation names ``rm_type`` itself, and training's reward functions so do not count."""
    reward_key: str | None
    correct_threshold: float
    apply_chat_template: bool
    custom_prompt_preprocessor: PromptPreprocessor | None
    answer_marker_type: AnswerMarker | None
    system_prompt: str | None


def plan_set(name: str, chosen: EvalKeys, defaults: EvalKeys, training: TrainingDefaults) -> SetPlan:
    """Return the plan of a set, key by key: its own, else the defaults', else as in training.

    Raises:
        ConfigError: If the keys do not fit together or the engine.
    """
    sampling = training.sampling

    def key(key: str, otherwise: Any) -> Any:
        return next((found for each in (chosen, defaults) if (found := getattr(each, key)) is not None), otherwise)

    params = _params(name, key, sampling)
    max_context_length = key("max_context_len", sampling.rollout_max_context_len) or training.context_length
    if max_context_length > training.context_length:
        raise ConfigError(
            f"eval set {name}: max_context_len = {max_context_length}: the engine takes {training.context_length} "
            "tokens; lower it"
        )
    room = max_context_length - params.max_new_tokens
    max_prompt_length = key("max_prompt_len", room)
    if room < 1 or max_prompt_length > room:
        raise ConfigError(
            f"eval set {name}: max_response_len = {params.max_new_tokens} leaves {max(0, room)} of "
            f"{max_context_length} tokens for a prompt: lower it or max_prompt_len, or raise engine.context_length"
        )
    own_rm_type = key("rm_type", None)
    is_chat = key("apply_chat_template", True)
    preprocessor, marker = key("custom_prompt_preprocessor", None), key("answer_marker_type", None)
    system_prompt = key("system_prompt", None)
    if problem := asking_problem(preprocessor, marker, is_chat=is_chat, system_prompt=system_prompt):
        raise ConfigError(f"eval set {name}: {problem}")
    return SetPlan(
        n_samples_per_prompt=key("n_samples_per_prompt", training.n_samples_per_prompt),
        params=params,
        max_context_length=max_context_length,
        max_prompt_length=max_prompt_length,
        num_prompts=key("num_prompts", None),
        rm_type=own_rm_type or training.rm_type,
        has_own_grader=own_rm_type is not None,
        reward_key=key("eval_reward_key", None) or key("reward_key", training.reward_key),
        correct_threshold=key("correct_threshold", 1.0),
        apply_chat_template=is_chat,
        custom_prompt_preprocessor=preprocessor,
        answer_marker_type=marker,
        system_prompt=system_prompt,
    )


def _params(name: str, key: Any, sampling: SamplingSettings) -> SamplingParams:
    stop = key("stop", sampling.rollout_stop)
    if not all(stop):
        raise ConfigError(f"eval set {name}: stop: an empty string would stop everything: remove it")
    params = SamplingParams(
        max_new_tokens=key("max_response_len", sampling.rollout_max_response_len),
        temperature=key("temperature", sampling.rollout_temperature),
        top_p=key("top_p", sampling.rollout_top_p),
        top_k=key("top_k", sampling.rollout_top_k),
        min_new_tokens=key("min_new_tokens", sampling.min_new_tokens),
        repetition_penalty=key("repetition_penalty", sampling.repetition_penalty),
        stop=stop,
        stop_token_ids=key("stop_token_ids", sampling.rollout_stop_token_ids),
        skip_special_tokens=key("skip_special_tokens", sampling.rollout_skip_special_tokens),
    )
    if params.min_new_tokens > params.max_new_tokens:
        raise ConfigError(
            f"eval set {name}: min_new_tokens = {params.min_new_tokens} is above max_response_len = "
            f"{params.max_new_tokens}: lower it"
        )
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Prompts by index, and how each is answered. Raises ConfigError if there is no prompt."""

    name: str
    prompts: tuple[Prompt, ...]
    plan: SetPlan
    num_over_length: int = 0
    """Prompts left out because they are too long."""
    num_repeats: int = 0
    """Prompts left out because an earlier one asks the same."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError(f"eval set {self.name}: has no prompt: choose another file, slice or max_prompt_len")

    @property
    def num_missing(self) -> int:
        """Prompts that were asked for and are not there."""
        return max(0, (self.plan.num_prompts or 0) - len(self.prompts))

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.plan.n_samples_per_prompt

    def seed(self, eval_seed: int) -> int:
        """Return what the seeds of the answers derive from, with the prompt's index and the answer's number."""
        return derive_seed(eval_seed, "eval", self.name)

    def draw(self, index: int) -> Group:
        """Return the prompt ``index`` as a group to be answered; its group index is ``index``."""
        return Group(index, self.prompts[index])


def without_repeats(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts of which no earlier one asks the same: the same tokens with the same images."""
    kept: dict[tuple[bytes, tuple[str, ...]], Prompt] = {}
    for prompt in prompts:
        kept.setdefault(what_is_asked(prompt), prompt)
    return list(kept.values())


def what_is_asked(prompt: Prompt) -> tuple[bytes, tuple[str, ...]]:
    """Return what makes two prompts the same to a model: tokens and images."""
    return prompt.token_ids.tobytes(), tuple(picture.content_hash for picture in prompt.images)
