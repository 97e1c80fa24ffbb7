"""``[prompts]``: where prompts come from."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from rollfeed.config.pictures import PictureSettings
from rollfeed.config.section import Free, Resume, Section
from rollfeed.protocols import AnswerMarker, PromptPreprocessor
from rollfeed.types.text import template_fields


def _checked_template(template: str) -> str:
    if not any(name is not None for _, name in template_fields(template)):
        raise ValueError("names no column: write {name} where one belongs")
    return template


Key = Annotated[str, Field(min_length=1)]
Template = Annotated[str, Field(min_length=1), AfterValidator(_checked_template)]
Parameters = dict[str, str | int | float | bool]
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

    system_prompt: str | None = Field(default=None, min_length=1)
    """The first message of every conversation that has no system message of its own."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        keys = self.custom_prompt_preprocessor, self.answer_marker_type
        if problem := asking_problem(*keys, is_chat=self.apply_chat_template, system_prompt=self.system_prompt):
            raise ValueError(problem)
        return self


def asking_problem(
    preprocessor: PromptPreprocessor | None,
    marker: AnswerMarker | None,
    *,
    is_chat: bool,
    system_prompt: str | None = None,
) -> str | None:
    """Return why a form of questions, the marks of answers and the chat template do not go together; or None."""
    if system_prompt is not None and not is_chat:
        return "system_prompt needs a chat template: set apply_chat_template = true, or remove it"
    if system_prompt is not None and preprocessor is PromptPreprocessor.CHAT:
        return f"custom_prompt_preprocessor = {preprocessor.value!r} has no system prompt: remove one of them"
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
    """Prompts that are there, a row each (`[[prompts.datasets]]`)."""

    path: str = Field(min_length=1)
    """A file of rows (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`; text also `.gz`, `.zst`, `.bz2`), a
    folder of such files or one that `datasets` saved, a pattern as `data/*.csv`, or a data set of the hub. Looked for
    beside the settings file, then in the current folder. `path@[a:b]` takes a slice of the rows; bounds may be
    negative.
    """
    split: Key | None = None
    """Of a folder or a data set of the hub that has several, as `train` and `test`."""
    name: str | None = Field(default=None, min_length=1)
    """Names the source in prompt ids and metrics; by default the file's stem, or the folder's name."""
    weight: Weight = 1.0
    """Share of the draws, relative to the other sources' weights."""
    input_key: Key = "prompt"
    """Column with the question: text, or a list of chat messages."""
    template: Template | None = None
    r"""The question made of columns, in place of `input_key`: `"{question} Answer in {unit}."`; a brace of the text is
    written twice, as in `\\boxed{{}}`.
    """
    label_key: Key | None = None
    """Column with the label that graders compare with."""
    metadata_key: Key | None = None
    """Column with a dictionary (or its JSON text) for graders and plug-ins; `rm_type` in it chooses the grader of
    that row.
    """
    metadata_columns: tuple[Key, ...] = Field(default=(), strict=False)
    """Further columns that become entries of the metadata, for reward functions that ask for them by name."""
    chosen_key: Key = "chosen"
    """Column with the preferred answer, a text or messages, where `train.kind = "reward_model"`."""
    rejected_key: Key = "rejected"
    """Column with the other answer."""
    margin_key: Key | None = None
    """Column with a number by which the preferred answer should score higher at least."""
    tools_key: Key | None = None
    """Column with tool definitions for the chat template."""
    image_key: Key | None = None
    """Column with pictures: paths beside the file, URLs, data URIs or bytes, one or a list; each has its place
    `<image>`, or a part of that type, in the question. See docs/pictures.md.
    """
    video_key: Key | None = None
    """Column with videos: files, animations, folders of frames or lists of pictures; their places are `<video>`."""
    adaptive: bool = False
    """Ask rows that were always or never solved less often, until that is forgotten; see docs/adaptive.md."""

    @property
    def pair_keys(self) -> dict[str, str]:
        """The columns of a pair, by their settings."""
        margin = {} if self.margin_key is None else {"margin_key": self.margin_key}
        return {"chosen_key": self.chosen_key, "rejected_key": self.rejected_key, **margin}

    @model_validator(mode="after")
    def _asks_once(self) -> Self:
        # Not by what was given: settings that a run has stored have all keys.
        if self.template is not None and self.input_key != type(self).model_fields["input_key"].default:
            raise ValueError("input_key and template both say what is asked: remove one of them")
        return self


class EnvironmentSettings(AskingSettings):
    """One procedural environment (`[[prompts.environments]]`)."""

    id: str = Field(min_length=1)
    """Namespaced id (`rollfeed env list` shows all), or the path of your own: `file.py:name` or `module:name`."""
    level: int = Field(default=0, ge=0, le=1_000_000)
    """Difficulty of the problems."""
    parameters: Parameters = Field(default={})
    """Of the environment, where it has any; see docs/evaluation.md."""
    weight: Weight = 1.0
    """Share of the draws, relative to the other sources' weights."""


class DifficultyPolicyName(StrEnum):
    """The rule by which levels change."""

    BAND = "band"
    RLVE = "rlve"
    LEARNING_PROGRESS = "learning_progress"
    FIXED = "fixed"


class AdaptiveSettings(AskingSettings, resume=Resume.ON_PURPOSE):
    """Environments whose levels follow what becomes of the answers; one source, beside those of other tables."""

    policy: DifficultyPolicyName = Field(default=DifficultyPolicyName.BAND, strict=False)
    """How levels change; see docs/adaptive.md. `band` goes up where the hardest level is solved more than
    sometimes and down where it hardly ever is; `rlve` up only, by the published rule; `learning_progress` looks at
    changes of the accuracy; `fixed` stays. `plugins.difficulty_policy` replaces it.
    """
    environment_list: tuple[Key, ...] = Field(min_length=1, strict=False)
    """Ids (`rollfeed env list` shows all), or paths of your own: `file.py:name` or `module:name`. One that is added to
    a run begins at `initial_difficulty`, one that is taken out goes on where it was when it is back.
    """
    parameters: Annotated[dict[str, Parameters], Resume.PROMPTS] = Field(default={})
    """Of environments that have any, by id."""
    initial_difficulty: int = Field(default=0, ge=0, le=1_000_000)
    """The hardest level at the start."""
    difficulty_sliding_window_size: int = Field(default=4, ge=1, le=1000)
    """Problems are made at so many levels: the hardest, and those below it."""
    min_metric_to_increase_difficulty: float = Field(default=0.9, ge=0.0, le=1.0, strict=False)
    """With `rlve`: the accuracy at the hardest level that raises it."""
    min_prompts_before_difficulty_check: int = Field(default=8, ge=1, le=1_000_000)
    """With `rlve`: prompts at the hardest level before their accuracy is looked at."""
    weight_by_spread: bool = False
    """Draw more from environments whose groups have right and wrong answers, and from each at least a twentieth of
    what it would get; otherwise from all alike.
    """
    max_observation_staleness: int | None = Field(default=8, ge=0, le=1_000_000)
    """Groups with tokens of a version that is this much older than the newest teach nothing of the difficulty; with
    `rlve` all count.
    """
    weight: Weight = 1.0
    """Share of the draws, relative to the other sources' weights."""

    @model_validator(mode="after")
    def _fits_the_policy(self) -> Self:
        if problem := next(self._policy_problems(), None):
            raise ValueError(problem)
        return self

    def _policy_problems(self) -> Iterator[str]:
        names = self.environment_list
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"environment_list has {twice[0]!r} twice: remove one"
        if unknown := sorted(self.parameters.keys() - set(names)):
            yield f"parameters.{unknown[0]!r}: not in environment_list: add it there, or remove its parameters"
        of_rlve = {"min_metric_to_increase_difficulty", "min_prompts_before_difficulty_check"}
        if self.policy is not DifficultyPolicyName.RLVE and (
            set_here := sorted(of_rlve & self.changed_values().keys())
        ):
            yield f"{set_here[0]} is of policy = 'rlve', and policy is {self.policy.value!r}: remove it, or set policy"


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
    """Procedural environments, each at one level."""
    adaptive: AdaptiveSettings | None = None
    """Procedural environments whose difficulty follows the answers."""
    pictures: PictureSettings = PictureSettings()
    """Bounds of pictures."""

    @property
    def environment_ids(self) -> tuple[str, ...]:
        """Ids or paths of all environments."""
        adaptive = () if self.adaptive is None else self.adaptive.environment_list
        return (*(each.id for each in self.environments), *adaptive)

    @model_validator(mode="after")
    def _names_differ(self) -> PromptSettings:
        names = [f"{environment.id}@{environment.level}" for environment in self.environments]
        names += [dataset.name or dataset.path for dataset in self.datasets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"source {twice[0]!r} is listed twice: give one of them another name, or one entry a larger weight"
            )
        adaptive = () if self.adaptive is None else self.adaptive.environment_list
        if both := sorted({environment.id for environment in self.environments}.intersection(adaptive)):
            raise ValueError(
                f"{both[0]!r} is in adaptive.environment_list and in environments, and would give the same problems "
                "twice: remove it from one of them"
            )
        return self
