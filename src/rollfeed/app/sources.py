"""Prompt sources from settings: read, checked against what answers and scores them, compared with evaluation sets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from rollfeed import plugins
from rollfeed.app.checks import reward_key_problem
from rollfeed.app.environments.adaptive import adaptive_source
from rollfeed.app.environments.task_makers import ChosenEnvironment, MakingPlan, ask_source, one_worker
from rollfeed.app.environments.ways_of_asking import asked_marker, asking, check_asking
from rollfeed.app.rewards import own_verifiers
from rollfeed.app.scoring.reward_models import learned_problems, scored_by_model
from rollfeed.compat.slime_plugins import with_slime_plugins
from rollfeed.config import (
    DatasetSettings,
    EnvironmentSettings,
    RolloutConfig,
    RolloutMode,
    Settings,
)
from rollfeed.config.paths import expand_path
from rollfeed.config.plugins import import_path_of
from rollfeed.config.train import TrainKind
from rollfeed.conversations import answered_prompt
from rollfeed.conversations.pairs import preference_prompt
from rollfeed.environments import (
    RLVE_RM_TYPE,
    EnvironmentRegistry,
    EnvironmentSource,
    environment_problem,
    hidden_text,
    rlve_problem,
)
from rollfeed.environments import RM_TYPE as ENVIRONMENT_RM_TYPE
from rollfeed.environments.making import PooledTaskMaker
from rollfeed.errors import ConfigError, suggestion
from rollfeed.evaluation import EvalSet
from rollfeed.evaluation.overlap import Overlap, find_overlaps
from rollfeed.prompts import (
    AdaptiveDatasetSource,
    ChatRenderer,
    ColumnKeys,
    DatasetSource,
    Learn,
    MixtureSource,
    RowCheck,
    load_prompts,
)
from rollfeed.protocols import MULTI_TURN, AnswerMarker, PictureInput, PromptSource, Tokenizer
from rollfeed.rewards.code.problem import tests_problem
from rollfeed.rewards.labels import NO_LABEL, LabelProblem
from rollfeed.rewards.registry import BUILTIN_GRADERS, CODE_RM_TYPE, REMOTE_RM_TYPE, grader_name, reads
from rollfeed.rewards.results import REWARD_KEY
from rollfeed.store import question_of
from rollfeed.types import Prompt
from rollfeed.workers import WorkerPool

_log = logging.getLogger(__name__)

_MAX_PROBLEMS = 2_000
"""Of an environment that are made for the comparison; data sets are compared whole."""
_MAX_SECONDS = 30.0
"""For these."""


def environment_source(environment_id: str, *, level: int, seed: int, tokenizer: Tokenizer) -> PromptSource:
    """Return a built-in or registered environment as a prompt source.

    Raises:
        ConfigError: If there is no such environment or level.
    """
    plan = MakingPlan.alone()
    (source,) = _environment_sources(
        [EnvironmentSettings(id=environment_id, level=level)],
        plan,
        partial(ChatRenderer, tokenizer, rollout_max_prompt_len=None),
        seed=seed,
    )
    if not isinstance(source.maker, PooledTaskMaker):
        return source
    return MixtureSource([(source.name, 1.0, source)], seed=seed, resources=[plan.workers])


def _environment_sources(
    chosen: Sequence[EnvironmentSettings], plan: MakingPlan, make_renderer: Callable[..., ChatRenderer], *, seed: int
) -> list[EnvironmentSource]:
    makers = plan.make([ChosenEnvironment(each.id, each.parameters) for each in chosen], seed=seed)
    sources = []
    for each, maker in zip(chosen, makers, strict=True):
        check_asking(maker.facts, each, each)
        source = EnvironmentSource(
            maker,
            level=each.level,
            seed=seed,
            renderer=make_renderer(**asking(each)),
            apply_chat_template=each.apply_chat_template,
        )
        ask_source(source, source.check)
        sources.append(source)
    return sources


@one_worker()
def build_source(
    settings: Settings,
    tokenizer: Tokenizer,
    *,
    folders: Sequence[Path] = (),
    rows: RowChecks | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    workers: WorkerPool | None = None,
    picture_input: PictureInput | None = None,
) -> PromptSource:
    """Return the prompt source that the settings describe, read and checked.

    Problems of environments that are not built in are made by ``workers``; by default one that ends with the source.

    Raises:
        ConfigError: If a file, column, row, environment or plug-in is wrong; one line that names it.
    """
    path = with_slime_plugins(settings, folders=folders).plugins.prompt_source
    if path is not None:
        return plugins.load_factory(path, PromptSource, tokenizer, key="plugins.prompt_source", folders=folders)
    make_renderer = partial(
        ChatRenderer,
        tokenizer,
        rollout_max_prompt_len=settings.max_prompt_length,
        tools=tools,
        call_format=settings.tools.call_format,
        **({} if picture_input is None else picture_input._asdict()),
    )
    is_blind = rows is not None and rows.no_images is not None
    make_asking = partial(make_renderer, loader=None, pictures=None) if is_blind else make_renderer
    sources: list[tuple[str, float, PromptSource]] = []
    own = [] if workers is not None else [WorkerPool(num_workers=1)]
    plan = MakingPlan(workers=workers or own[0], timeout_seconds=settings.prompts.make_timeout_seconds, folders=folders)
    chosen = settings.prompts.environments
    made = _environment_sources(chosen, plan, make_asking, seed=settings.seed)
    sources += [(source.name, each.weight, source) for each, source in zip(chosen, made, strict=True)]
    if (adaptive := settings.prompts.adaptive) is not None:
        adapting = adaptive_source(adaptive, settings, plan, make_asking(**asking(adaptive)))
        sources.append((adapting.name, adaptive.weight, adapting))
    is_sft = settings.rollout.mode is RolloutMode.SFT
    learn: Learn = partial(answered_prompt, tokenizer=tokenizer, mask_type=settings.rollout.loss_mask_type)
    for dataset in settings.prompts.datasets:
        if is_sft and (dataset.adaptive or any(asking(dataset).values())):
            raise ConfigError(
                f"prompts.datasets: {dataset.path}: what is learned as it stands is not asked: remove "
                "custom_prompt_preprocessor, answer_marker_type, system_prompt and adaptive"
            )
        renderer = make_renderer(**asking(dataset))
        if settings.train.kind is TrainKind.REWARD_MODEL:
            pair_keys: dict[str, Any] = dataset.pair_keys
            learn = partial(preference_prompt, tokenizer=tokenizer, **pair_keys)
        read = _dataset_source(
            dataset, settings, renderer, folders, None if is_sft else rows, learn if is_sft else None
        )
        _tell_what_was_left_out(read, settings)
        sources.append((read.name, dataset.weight, read))
    return MixtureSource(sources, seed=settings.seed, resources=own)


def find_file(path: str, folders: Sequence[Path]) -> Path:
    """Return the first of ``folders`` with such a file, or one that fits a pattern; a slice behind it does not count.

    ``~`` and environment variables are replaced. A file that is nowhere is returned all the same, for its reader to
    complain of.
    """
    path = expand_path(path)
    for folder in folders:
        for name in (path, path.rpartition("@[")[0]):
            if name and ((folder / name).exists() or (has_magic(name) and glob(str(folder / name), recursive=True))):
                return folder / path
    return Path(path)


def _dataset_source(
    dataset: DatasetSettings,
    settings: Settings,
    renderer: ChatRenderer,
    folders: Sequence[Path],
    rows: RowChecks | None,
    learn: Learn | None,
) -> DatasetSource:
    def unlabelled(prompt: Prompt, rm_type: str) -> str:
        return f"prompts.datasets: rm_type = {rm_type!r} needs labels, and {dataset.path} has none: set its label_key"

    has_pairs = settings.train.kind is TrainKind.REWARD_MODEL
    pair_columns = dataset.pair_keys.values() if has_pairs else ()
    loaded = load_prompts(
        str(find_file(dataset.path, folders)),
        name=dataset.name,
        split=dataset.split,
        renderer=renderer,
        keys=ColumnKeys(
            input_key=dataset.input_key,
            template=dataset.template,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            metadata_columns=(*dataset.metadata_columns, *pair_columns),
            tools_key=dataset.tools_key,
            image_key=dataset.image_key,
            video_key=dataset.video_key,
        ),
        apply_chat_template=dataset.apply_chat_template,
        skip_bad_rows=settings.prompts.skip_bad_rows,
        no_images=None if rows is None else rows.no_images,
        check_row=None
        if rows is None
        else rows.of(dataset.path, label_key=dataset.label_key, unlabelled=unlabelled, marker=asked_marker(dataset)),
        learn=learn,
    )
    make_source = (
        partial(AdaptiveDatasetSource, group_size=settings.rollout.n_samples_per_prompt)
        if dataset.adaptive
        else DatasetSource
    )
    return make_source(
        loaded,
        seed=settings.seed,
        rollout_shuffle=settings.prompts.rollout_shuffle,
        num_epoch=settings.prompts.num_epoch,
    )


def _tell_what_was_left_out(dataset: DatasetSource, settings: Settings) -> None:
    if dataset.loaded.num_over_length:
        _log.warning(
            "%d %s of %s are over %s = %d tokens and are left out",
            dataset.loaded.num_over_length,
            "conversations" if dataset.loaded.has_answers else "prompts",
            dataset.name,
            "context_length" if dataset.loaded.has_answers else "rollout_max_prompt_len",
            settings.max_prompt_length,
        )
    if dataset.loaded.num_bad_rows:
        _log.warning(
            "%d rows of %s cannot be used and are left out, the first: %s",
            dataset.loaded.num_bad_rows,
            dataset.name,
            dataset.loaded.first_bad_row,
        )


def source_names(settings: Settings) -> list[str]:
    """Return what a run draws its prompts from, for people."""
    if settings.plugins.prompt_source is not None:
        return [import_path_of(settings.plugins.prompt_source)]
    environments = [f"{each.id}@{each.level}" for each in settings.prompts.environments]
    if settings.prompts.adaptive is not None:
        environments += [f"{each}@adaptive" for each in settings.prompts.adaptive.environment_list]
    return environments + [dataset.name or dataset.path for dataset in settings.prompts.datasets]


class RowChecks:
    """Makes the check of each data set.

    A row is scored as the reward hub scores it: by the function that its metadata names, else the configured function,
    else the grader of its ``rm_type``. What a user's function can use is not known, and not checked.

    Args:
        config: What scores.
        unscored: What to do about a row that nothing scores; None leaves it to somebody else.
        no_images: Why what answers takes no images; None where it does, or nobody knows.
        function_problem: Why a reward function cannot be called for a row.
        label_problems: Of graders that settings make, by ``rm_type``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        unscored: str | None,
        no_images: str | None,
        function_problem: Callable[[Prompt], str | None] | None = None,
        label_problems: Mapping[str, LabelProblem] | None = None,
    ) -> None:
        self.runs_programs = False
        """Whether a row was seen whose answers are programs, to be run in a sandbox."""
        self._reward = config.reward
        self._has_function = config.plugins.has_reward
        self._unscored = unscored
        # What a function of the user's makes of images is not known.
        self.no_images = None if config.plugins.generate or config.plugins.rollout else no_images
        # One that gives samples further metadata may be the user's, too.
        is_known = not (config.plugins.generate or config.plugins.rollout)
        self._asks = function_problem if function_problem is not None and is_known else lambda prompt: None
        self._verifiers = own_verifiers(config.reward)
        registry, url = EnvironmentRegistry(), config.reward.remote.url
        self._problems: dict[str, LabelProblem] = {
            **{name: grader.problem for name, grader in BUILTIN_GRADERS.items()},
            CODE_RM_TYPE: tests_problem,
            ENVIRONMENT_RM_TYPE: lambda label, metadata: environment_problem(registry, metadata),
            RLVE_RM_TYPE: lambda label, metadata: rlve_problem(registry, metadata),
            REMOTE_RM_TYPE: lambda label, metadata: "no server: set reward.remote.url" if url is None else None,
            **(label_problems or {}),
        }
        self._scored_by_model = scored_by_model(config.reward)
        self._problems |= learned_problems(config.reward, self._problems)

    def of(
        self,
        path: str,
        *,
        label_key: str | None,
        unlabelled: Callable[[Prompt, str], str | None],
        marker: AnswerMarker | None = None,
    ) -> RowCheck:
        """Return the check of a data set.

        Args:
            path: The file, for people.
            label_key: The column with the labels.
            unlabelled: Given a row and its ``rm_type``, the whole message where there is no such column and labels are
                needed; None leaves it to somebody else.
            marker: The marks in which it asks for answers.
        """

        def check(prompt: Prompt) -> str | None:
            if prompt.images and self.no_images is not None:
                raise ConfigError(f"{path}: {prompt.prompt_id} has images, and {self.no_images}")
            rm_type, problem = self._problem(prompt)
            if prompt.images and rm_type in self._scored_by_model:
                raise ConfigError(
                    f"{path}: {prompt.prompt_id} has images, and the reward model takes text only: name another rm_type"
                )
            if rm_type and marker is not None and not reads(rm_type, marker):
                raise ConfigError(
                    f"{path}: answers are asked for in {marker.value}, where rm_type {rm_type!r} reads none: choose "
                    "another, such as math_verify, or other marks"
                )
            if problem != NO_LABEL:
                return problem
            if label_key is not None:
                return f"{NO_LABEL} in column {label_key!r}, and rm_type {rm_type!r} needs one"
            if message := unlabelled(prompt, rm_type):
                raise ConfigError(message)
            return None

        return check

    def _problem(self, prompt: Prompt) -> tuple[str, str | None]:
        """Return the grader, and why it can score no answer; an empty name where that is a function."""
        metadata = prompt.metadata
        name = metadata.get("reward_fn")
        if name is not None:
            is_known = isinstance(name, str) and name in self._reward.functions
            remedy = suggestion(str(name), self._reward.functions, otherwise="name it in [reward.functions]")
            return "", self._asks(prompt) if is_known else f"reward_fn = {name!r:.80}: no such function; {remedy}"
        own: Any = metadata.get("rm_type")
        if self._has_function and not (isinstance(own, str) and own in self._verifiers):
            return "", self._asks(prompt)
        rm_type = self._reward.rm_type if own is None else own
        if rm_type is None:
            return "", None if self._unscored is None else f"nothing scores it: {self._unscored}"
        found = None
        if isinstance(rm_type, str):
            found = self._problems.get(rm_type) or self._problems.get(grader_name(rm_type))
        if found is None:  # that there is no grader of the settings is no fault of a row, and found elsewhere
            missing = f"rm_type = {own!r:.80}: no such grader; {suggestion(str(own), self._problems)}"
            return "", None if own is None else missing
        self.runs_programs = self.runs_programs or grader_name(rm_type) == CODE_RM_TYPE
        problem = found(prompt.label, metadata)
        if problem is None:
            key = metadata.get(REWARD_KEY) or self._reward.reward_key
            problem = reward_key_problem(key, rm_type, is_of_others=True)
        return rm_type, problem if problem in (None, NO_LABEL) else f"rm_type {rm_type}: {problem}"


@one_worker()
def overlaps(source: PromptSource, eval_sets: Sequence[EvalSet], settings: Settings) -> tuple[Overlap, ...]:
    """Return what each set has in common with a run's prompts; nothing for a source of the user's, which is not drawn.

    Raises:
        RunFailedError: If problems of an environment cannot be made.
    """
    if not eval_sets or not isinstance(source, MixtureSource):
        return ()
    return find_overlaps(_training_prompts(source, settings), eval_sets, question_of=_question)


def _question(prompt: Prompt) -> str:
    hidden = hidden_text(prompt.metadata["params"]) if prompt.metadata.get(MULTI_TURN) else ""
    return question_of(prompt.text, prompt.messages or ()) + hidden


def _training_prompts(source: MixtureSource, settings: Settings) -> Iterator[Prompt]:
    num_drawn = settings.rollout.num_rollout * settings.rollout.rollout_batch_size
    for each in source.sources:
        if isinstance(each, DatasetSource):
            yield from each.prompts
        elif isinstance(each, EnvironmentSource):
            yield from ask_source(each, partial(each.first, min(num_drawn, _MAX_PROBLEMS), seconds=_MAX_SECONDS))
