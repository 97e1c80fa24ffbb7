"""``[prompts]``: where prompts come from."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rollfeed.config.section import Free, Resume, Section
from rollfeed.protocols import AnswerMarker, PromptPreprocessor

Key = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(gt=0.0, le=1e6, strict=False)]


class AskingSettings(Section):
    """The way in which a source's questions are asked; see docs/environments.md."""

    apply_chat_template: bool = True
    """Render through the model's chat template; `false` sends the text as it is."""
    custom_prompt_preprocessor: PromptPreprocessor | None = Field(default=None, strict=False)
    r"""`TinyZero` is plain text (`apply_chat_template = false`) with thoughts and an answer in `<answer></answer>`;
    `ChatTemplate_NoSystemPrompt` one user turn, for answers in `\boxed{}`. By default the question as it is.
    """
    answer_marker_type: AnswerMarker | None = Field(default=None, strict=False)
    r"""`\boxed{}` or `<answer></answer>`: a sentence behind each question in text asks for an answer in it."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        keys = self.custom_prompt_preprocessor, self.answer_marker_type
        if problem := asking_problem(*keys, is_chat=self.apply_chat_template):
            raise ValueError(problem)
        return self


def asking_problem(
    preprocessor: PromptPreprocessor | None, marker: AnswerMarker | None, *, is_chat: bool
) -> str | None:
    """Return why a form of questions, the marks of answers and the chat template do not go together; or None."""
    if preprocessor is None:
        return None
    chats = preprocessor is PromptPreprocessor.CHAT
    if is_chat is not chats:
        needed = "a chat template: set apply_chat_template = true" if chats else "none: set apply_chat_template = false"
        return f"custom_prompt_preprocessor = {preprocessor.value!r} needs {needed}"
    fitting = AnswerMarker.BOXED if chats else AnswerMarker.TAGS
    if marker not in (None, fitting):
        return (
            f"answer_marker_type = {marker.value!r} does not go with custom_prompt_preprocessor = "
            f"{preprocessor.value!r}: use {fitting.value!r}, or leave one of them out"
        )
    return None


class DatasetSettings(AskingSettings):
    """One file of prompts, a row each (`[[prompts.datasets]]`)."""

    path: str = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, looked for beside the settings file, then in the current folder. `path@[a:b]`
    takes a slice of its rows; bounds may be negative.
    """
    name: str | None = Field(default=None, min_length=1)
    """Names the source in prompt ids and metrics; by default the file's stem."""
    weight: Weight = 1.0
    """Share of the draws, relative to the other sources' weights."""
    input_key: Key = "prompt"
    """Column with the question: text, or a list of chat messages."""
    label_key: Key | None = None
    """Column with the label that graders compare with."""
    metadata_key: Key | None = None
    """Column with a dictionary (or its JSON text) for graders and plug-ins; `rm_type` in it chooses the grader of
    that row.
    """
    tools_key: Key | None = None
    """Column with tool definitions for the chat template."""
    image_key: Key | None = None
    """Column with image paths or URLs."""


class EnvironmentSettings(AskingSettings):
    """One procedural environment (`[[prompts.environments]]`)."""

    id: str = Field(min_length=1)
    """Namespaced id (`rollfeed env list` shows all), or the path of your own: `file.py:name` or `module:name`."""
    level: int = Field(default=0, ge=0, le=1_000_000)
    """Difficulty of the problems."""
    parameters: dict[str, str | int | float | bool] = Field(default={})
    """Of the environment, where it has any; see docs/evaluation.md."""
    weight: Weight = 1.0
    """Share of the draws, relative to the other sources' weights."""


class PromptSettings(Section, resume=Resume.PROMPTS):
    """Prompt sources, and what holds for all of them."""

    rollout_max_prompt_len: int | None = Field(default=None, ge=1, le=10_000_000)
    """Prompts over this many tokens are dropped and counted; by default what `rollout_max_context_len` and
    `rollout_max_response_len` leave.
    """
    rollout_shuffle: bool = False
    """Shuffle every data set anew each epoch, by (seed, epoch)."""
    num_epoch: Free[int | None] = Field(default=None, ge=1, le=1_000_000)
    """End a data set after this many epochs; by default it starts over for ever. When all sources have ended, the run
    ends with the batches that it has. May be raised to go on.
    """
    skip_bad_rows: bool = False
    """Count and skip rows that cannot be read, instead of refusing the file."""
    make_timeout_seconds: Free[float] = Field(default=10.0, gt=0.0, le=86_400.0, strict=False)
    """For one problem of an environment that is not built in; what takes longer is killed and passed over."""
    datasets: tuple[DatasetSettings, ...] = Field(default=(), strict=False)
    """Files of prompts."""
    environments: tuple[EnvironmentSettings, ...] = Field(default=(), strict=False)
    """Procedural environments."""

    @model_validator(mode="after")
    def _names_differ(self) -> PromptSettings:
        names = [f"{environment.id}@{environment.level}" for environment in self.environments]
        names += [dataset.name or dataset.path for dataset in self.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"source {twice[0]!r} is listed twice: give one of them another name, or one entry a larger weight"
            )
        return self
