"""``[eval]``: what the policy is measured on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollfeed.config.prompts import Template
from rollfeed.config.sampling import TopK
from rollfeed.config.section import Resume, Section
from rollfeed.protocols import AnswerMarker, PromptPreprocessor

_Key = Annotated[str, Field(min_length=1)]


class EvalKeys(Section):
    """Keys that `[eval]` has for all sets, and a set for itself; one that neither has is as in training."""

    n_samples_per_prompt: int | None = Field(default=None, ge=1, le=100_000)
    """Answers to each prompt; by default `rollout.n_samples_per_prompt`. pass@k and pass^k are given for k = 1, 2, 4
    and so on, as far as this.
    """
    num_prompts: int | None = Field(default=None, ge=1, le=10_000_000)
    """Different prompts of a set, its first ones; by default all of a file, and 100 problems of an environment. A level
    with fewer has a set of all of them.
    """
    temperature: float | None = Field(default=None, ge=0.0, le=100.0, strict=False)
    """By default `sampling.rollout_temperature`; 0 takes the likeliest token."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, strict=False)
    """By default `sampling.rollout_top_p`."""
    top_k: TopK | None = Field(default=None, ge=-1, le=10_000_000)
    """By default `sampling.rollout_top_k`."""
    max_response_len: int | None = Field(default=None, ge=1, le=10_000_000)
    """Tokens of a response; by default `sampling.rollout_max_response_len`."""
    max_context_len: int | None = Field(default=None, ge=2, le=100_000_000)
    """Tokens of prompt and response together; by default `sampling.rollout_max_context_len`."""
    max_prompt_len: int | None = Field(default=None, ge=1, le=10_000_000)
    """Prompts over this many tokens are left out and counted; by default what context and response leave."""
    min_new_tokens: int | None = Field(default=None, ge=0, le=10_000_000)
    """By default `sampling.min_new_tokens`."""
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=100.0, strict=False)
    """By default `sampling.repetition_penalty`."""
    stop: tuple[str, ...] | None = Field(default=None, strict=False)
    """By default `sampling.rollout_stop`."""
    stop_token_ids: tuple[int, ...] | None = Field(default=None, strict=False)
    """By default `sampling.rollout_stop_token_ids`."""
    skip_special_tokens: bool | None = None
    """By default `sampling.rollout_skip_special_tokens`."""
    rm_type: _Key | None = None
    """Grader by name, for prompts that bring none of their own; it replaces a reward function of `[plugins]` too. By
    default what scores in training.
    """
    reward_key: _Key | None = None
    """Which entry of a reward dictionary is the reward; by default `reward.reward_key`."""
    eval_reward_key: _Key | None = None
    """The same for evaluation only: it goes before every `reward_key`."""
    correct_threshold: float | None = Field(default=None, ge=-1e9, le=1e9, strict=False)
    """A reward of at least this is a right answer, where the grader does not say itself which are; by default 1."""
    apply_chat_template: bool | None = None
    """Render through the model's chat template; by default true."""
    custom_prompt_preprocessor: PromptPreprocessor | None = Field(default=None, strict=False)
    """As in `[[prompts.datasets]]`."""
    answer_marker_type: AnswerMarker | None = Field(default=None, strict=False)
    """As in `[[prompts.datasets]]`."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """As in `[[prompts.datasets]]`."""


class EvalColumnKeys(EvalKeys):
    """The columns of files, besides."""

    input_key: _Key | None = None
    """Column with the question; by default `prompt`."""
    template: Template | None = None
    """The question made of columns, as in `[[prompts.datasets]]`; it goes before `input_key`."""
    label_key: _Key | None = None
    """Column with the label that graders compare with."""
    metadata_key: _Key | None = None
    """Column with a dictionary (or its JSON text) for graders; `rm_type` in it chooses the grader of that row."""
    metadata_columns: tuple[_Key, ...] | None = Field(default=None, strict=False)
    """Further columns that become entries of the metadata."""
    tools_key: _Key | None = None
    """Column with tool definitions for the chat template."""
    image_key: _Key | None = None
    """Column with pictures, as in `[[prompts.datasets]]`."""
    video_key: _Key | None = None
    """Column with videos, as in `[[prompts.datasets]]`."""


class EvalDatasetSettings(EvalColumnKeys):
    """A file of prompts, or a slice of one, to measure on (`[[eval.datasets]]`)."""

    path: str = Field(min_length=1)
    """Rows as `[[prompts.datasets]]` takes them; `path@[a:b]` takes a slice of them."""
    split: _Key | None = None
    """Of a folder or a data set of the hub that has several."""
    name: _Key | None = None
    """Names the set in results; by default the file's stem, or the folder's name."""


class EvalEnvironmentSettings(EvalKeys):
    """Problems of an environment to measure on (`[[eval.environments]]`)."""

    id: str = Field(min_length=1)
    """Namespaced id (`rollfeed env list` shows all), or the path of your own: `file.py:name` or `module:name`."""
    level: int = Field(default=0, ge=0, le=1_000_000)
    """Difficulty of the problems."""
    parameters: dict[str, str | int | float | bool] = Field(default={})
    """Of the environment, where it has any; see docs/evaluation.md."""
    split: str = Field(default="eval", min_length=1)
    """Every split but `train` has the problems that are held out of training; splits differ in their seeds."""
    name: _Key | None = None
    """Names the set in results; by default `id@level`."""


class EvalSettings(EvalColumnKeys, resume=Resume.FREE):
    """Sets to measure on, and defaults for all of them; see docs/evaluation.md."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Held-out problems and the sampling of their answers derive from it and not from the run's `seed`, so that runs of
    several seeds are measured on the same requests.
    """
    datasets: tuple[EvalDatasetSettings, ...] = Field(default=(), strict=False)
    """Files of prompts."""
    environments: tuple[EvalEnvironmentSettings, ...] = Field(default=(), strict=False)
    """Procedural environments."""

    @property
    def has_sets(self) -> bool:
        """Whether there is anything to measure on."""
        return bool(self.datasets or self.environments)

    @model_validator(mode="after")
    def _names_differ(self) -> EvalSettings:
        names = [each.name or f"{each.id}@{each.level}" for each in self.environments]
        names += [each.name or each.path for each in self.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"set {twice[0]!r} is listed twice: give one of them another name")
        return self
