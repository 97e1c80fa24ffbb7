"""A whole run: prepared and checked first, then made step by step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfeed import plugins
from rollfeed.app.combination import check_combination
from rollfeed.app.model import Model, build_engine, load_settings_model
from rollfeed.app.rewards import load_named_functions, load_reward_function
from rollfeed.app.rollouts import open_rollouts
from rollfeed.app.sources import build_source
from rollfeed.app.sources.end_of_data import DataLimit, data_limit, early_end
from rollfeed.app.sources.rows import RowChecks, no_images_of
from rollfeed.app.stored_run import chosen_of_stored, stored_settings, stored_template_date
from rollfeed.config import FilterSettings, RolloutConfig, Settings
from rollfeed.errors import (
    COMPUTING_ERRORS,
    ConfigError,
    PromptsEndedError,
    RollfeedError,
    RunDirectoryError,
    RunFailedError,
    in_one_line,
)
from rollfeed.faults import once_started
from rollfeed.filters import build_batch_filter, build_filter
from rollfeed.pipeline import Rollouts
from rollfeed.protocols import (
    AdvantageFn,
    BatchedRewardFn,
    BatchFilter,
    BufferPolicy,
    Engine,
    GenerateFn,
    GroupFilter,
    GroupRewardFn,
    PromptSource,
    RewardFn,
    RolloutFn,
    RolloutObserver,
    SampleHook,
    Tracker,
)
from rollfeed.rewards import Takes
from rollfeed.store import Rewind, RunDirectory
from rollfeed.store.layout import holds_training
from rollfeed.types import LedgerCounts, StepCommit


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """Everything a run is made of, checked and not yet started."""

    settings: Settings
    config: RolloutConfig
    source: PromptSource
    engine: Engine
    model: Model
    tracker: Tracker | None
    rows: RowChecks
    """Whether rows of data sets can be answered and scored."""
    data_limit: DataLimit | None = None
    """How many batches there are, where the data ends."""
    folders: tuple[Path, ...] = ()
    """Where data files and plug-in modules were looked for."""
    chosen: frozenset[str] = frozenset()
    """Keys of settings that are as they are on purpose."""

    @property
    def num_batches(self) -> int:
        """How many batches there will be, as far as it is known."""
        num_rollout = self.settings.rollout.num_rollout
        return num_rollout if self.data_limit is None else min(num_rollout, self.data_limit.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a finished run has done."""

    directory: Path
    num_steps: int
    num_resumed_steps: int
    """Of these, how many an earlier process had done."""
    ledger: LedgerCounts
    early_end: str | None = None
    """Why there are fewer steps than were asked for."""


def prepare(
    settings: Settings,
    *,
    folders: Sequence[Path] = (),
    out: Path | None = None,
    chosen: Collection[str] = (),
) -> PreparedRun:
    """Make and check everything a run needs, without starting an engine or writing a file.

    Args:
        settings: The whole tree.
        folders: Where data files and plug-in modules are looked for, in this order.
        out: A run directory; where it holds a run that is gone on with, chat templates are told that run's date.
        chosen: Keys of settings that a run which is gone on with may have otherwise only on purpose, and has so; see
            :mod:`rollfeed.config.resuming`.

    Raises:
        ConfigError: If anything is wrong that can be known before the engine starts.
    """
    config = build_config(settings, folders=folders)
    check_combination(settings, config)
    settings = _with_template_date(settings, None if out is None else stored_template_date(settings, out))
    model = load_settings_model(settings)
    settings = _with_template_date(settings, model.template_date)
    engine = build_engine(model, settings.engine, deterministic=settings.rollout.deterministic)
    rows = RowChecks(
        config,
        rm_type=config.rm_type,
        reward_key=config.reward_key,
        has_function=config.has_reward_function,
        unscored="set reward.rm_type or plugins.reward",
        no_images=no_images_of(settings.engine, model),
    )
    source = build_source(settings, model.tokenizer, folders=folders, rows=rows)
    # Nothing is started by this: it shows that all parts fit together.
    open_rollouts(config, source=source, engine=engine, tokenizer=model.tokenizer)
    tracker_path = settings.plugins.tracker
    tracker = None
    if tracker_path is not None:
        tracker = plugins.load_factory(tracker_path, Tracker, key="plugins.tracker", folders=folders)
    return PreparedRun(
        settings=settings,
        config=config,
        source=source,
        engine=engine,
        model=model,
        tracker=tracker,
        rows=rows,
        data_limit=data_limit(source, settings, config),
        folders=tuple(folders),
        chosen=frozenset(chosen),
    )


def _with_template_date(settings: Settings, date: str | None) -> Settings:
    """Return settings with the date that chat templates are told, unless they name one."""
    if date is None or settings.model.template_date is not None:
        return settings
    model = settings.model.model_copy(update={"template_date": date})
    return settings.model_copy(update={"model": model})


async def resume(
    directory: Path,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    observers: Sequence[RolloutObserver] = (),
) -> RunSummary:
    """Go on with the run in ``directory``, with the settings stored there.

    Args:
        directory: What :func:`run` was given as ``out``.
        step: Go back to the state after this committed step, the last that is kept: for a trainer whose
            checkpoint is older. A finished run is gone on with too then.
        overrides: ``key=value``: settings that may differ, such as ``rollout.num_rollout``; those that do so only on
            purpose are among them.
        observers: As for :func:`run`.

    Raises:
        RunDirectoryError: If there is no run, no such step, or the run cannot be gone on with.
        RollfeedError: As for :func:`run`.
    """
    settings, folders = stored_settings(directory, overrides)
    chosen = chosen_of_stored(directory, overrides, settings)
    if problem := run_problem(settings, directory, overwrite=False, step=step, chosen=chosen):
        raise RunDirectoryError(problem)
    return await run(prepare(settings, folders=folders, chosen=chosen), out=directory, step=step, observers=observers)


async def run(
    prepared: PreparedRun,
    *,
    out: Path,
    overwrite: bool = False,
    step: int | None = None,
    observers: Sequence[RolloutObserver] = (),
) -> RunSummary:
    """Make all steps of a run, or those that an earlier process left to do.

    With ``step`` the run in ``out`` goes back to its state after that committed step first.

    Raises:
        RunDirectoryError: If ``out`` cannot be used; nothing has been started then.
        RollfeedError: If the run fails; finished steps stay readable, and the same call resumes it.
    """
    if problem := run_problem(prepared.settings, out, overwrite=overwrite, step=step, chosen=prepared.chosen):
        raise RunDirectoryError(problem)

    num_rollout = prepared.settings.rollout.num_rollout

    async def body(rollouts: Rollouts) -> str | None:
        try:
            while rollouts.next_step < num_rollout:
                await rollouts.generate_batch()
        except PromptsEndedError as ended:
            return early_end(ended, rollouts, num_rollout=num_rollout)
        return None

    with open_directory(prepared, out, overwrite=overwrite, step=step) as directory:
        return await make_steps(directory, prepared, observers, body)


def run_problem(
    settings: Settings, out: Path, *, overwrite: bool, step: int | None, chosen: Collection[str] = ()
) -> str | None:
    """Return why a run can neither begin nor go on in a directory; None if it can. Nothing is changed."""
    if holds_training(out) and not overwrite:
        return (
            f"{out}: holds a training, which batches alone would not go on with: use rollfeed train FILE --out {out}, "
            "or choose another directory"
        )
    return RunDirectory.problem(out, identity=settings.identity(), overwrite=overwrite, step=step, chosen=chosen)


def open_directory(prepared: PreparedRun, out: Path, *, overwrite: bool, step: int | Rewind | None) -> RunDirectory:
    """Start a run at ``out`` or go on with the one that is there; see :meth:`RunDirectory.open`."""
    settings = prepared.settings
    return RunDirectory.open(
        out,
        settings=settings.model_dump(mode="json"),
        identity=settings.identity(),
        overwrite=overwrite,
        step=step,
        folders=prepared.folders,
        chosen=prepared.chosen,
    )


async def make_steps(
    directory: RunDirectory,
    prepared: PreparedRun,
    observers: Sequence[RolloutObserver],
    body: Callable[[Rollouts], Awaitable[str | None]],
) -> RunSummary:
    """Have ``body`` make the steps of a run with a manager that goes on from there, and store how the run ended.

    ``body`` returns why it made fewer steps than it was asked for, if it did.

    Raises:
        RollfeedError: If the run fails; the cause is stored.
    """
    try:
        rollouts = _open_run(directory, prepared, observers)
        resumed = rollouts.next_step
        with plugins.closing(prepared.tracker):
            async with rollouts:
                with once_started():
                    ended = await body(rollouts)
            directory.finish(ended)
    except RollfeedError as error:
        directory.fail(str(error))
        raise
    except COMPUTING_ERRORS as error:
        failed = RunFailedError(f"a computation failed: {in_one_line(error)}")
        directory.fail(str(failed))
        raise failed from error
    return RunSummary(
        directory=directory.path,
        num_steps=rollouts.next_step,
        num_resumed_steps=resumed,
        ledger=rollouts.ledger,
        early_end=ended,
    )


def _open_run(directory: RunDirectory, prepared: PreparedRun, observers: Sequence[RolloutObserver]) -> Rollouts:
    """Return a manager that stores its steps in ``directory`` and goes on from there."""
    settings, tracker = prepared.settings, prepared.tracker

    def commit(step: StepCommit) -> None:
        directory.commit(step, reward_key=settings.reward.reward_key)
        if tracker is not None:
            plugins.log(tracker, step.batch)

    return open_rollouts(
        prepared.config,
        source=prepared.source,
        engine=prepared.engine,
        tokenizer=prepared.model.tokenizer,
        state=directory.state,
        commit=commit,
        observers=observers,
        on_isolation=directory.record_isolation,
        spill=directory.spill,
    )


def build_config(settings: Settings, *, folders: Sequence[Path] = ()) -> RolloutConfig:
    """Turn settings into a :class:`RolloutConfig`: plug-ins are imported, filters made.

    Raises:
        ConfigError: If a plug-in or filter does not exist or does not fit.
    """

    def load(name: str, protocol: type[Any]) -> Any:
        path = getattr(settings.plugins, name)
        return None if path is None else plugins.load_plugin(path, protocol, key=f"plugins.{name}", folders=folders)

    def load_reward(name: str, protocol: type[Any], takes: Takes) -> Any:
        path = getattr(settings.plugins, name)
        if path is None:
            return None
        killable = settings.reward.functions_in_workers
        return load_reward_function(path, protocol, takes, key=f"plugins.{name}", folders=folders, killable=killable)

    own_filters = tuple(
        plugins.load_plugin(path, GroupFilter, key="plugins.group_filters", folders=folders)
        for path in settings.plugins.group_filters
    )
    builtin = tuple(_builtin_filter(each, settings) for each in settings.filters.dynamic_sampling)
    return RolloutConfig(
        **settings.rollout.model_dump(),
        seed=settings.seed,
        sampling=settings.sampling,
        generate=load("generate", GenerateFn),
        rollout=load("rollout", RolloutFn),
        reward=load_reward("reward", RewardFn, Takes.SAMPLE),
        batched_reward=load_reward("batched_reward", BatchedRewardFn, Takes.SAMPLES),
        group_reward=load_reward("group_reward", GroupRewardFn, Takes.GROUP),
        named_rewards=load_named_functions(settings.reward, folders=folders),
        rm_type=settings.reward.rm_type,
        reward_key=settings.reward.reward_key,
        reward_timeout_seconds=settings.reward.timeout_seconds,
        reward_concurrency=settings.reward.concurrency,
        override_environments=settings.reward.override_environments,
        reward_workers=settings.reward.workers,
        code_reward=settings.reward.code,
        remote_reward=settings.reward.remote,
        group_filters=(*builtin, *own_filters),
        batch_filter=load("batch_filter", BatchFilter) or _builtin_batch_filter(settings),
        buffer=settings.buffer,
        buffer_policy=load("buffer_policy", BufferPolicy),
        placement=settings.placement,
        weights=settings.weights,
        num_extra_groups=settings.filters.over_sampling.num_extra if settings.filters.over_sampling else None,
        sample_hook=load("sample_hook", SampleHook),
        advantage=load("advantage", AdvantageFn),
        estimator=settings.advantage,
        overlong=settings.reward.overlong,
    )


def _builtin_filter(chosen: FilterSettings, settings: Settings) -> GroupFilter:
    try:
        return build_filter(
            chosen.name,
            chosen.parameters,
            n_samples_per_prompt=settings.rollout.n_samples_per_prompt,
            reward_key=settings.reward.reward_key,
        )
    except ConfigError as error:
        raise ConfigError(f"filters.dynamic_sampling: {error}") from None


def _builtin_batch_filter(settings: Settings) -> BatchFilter | None:
    chosen = settings.filters.over_sampling
    if chosen is None or chosen.name is None:
        return None
    try:
        return build_batch_filter(chosen.name, chosen.parameters, reward_key=settings.reward.reward_key)
    except ConfigError as error:
        raise ConfigError(f"filters.over_sampling: {error}") from None
