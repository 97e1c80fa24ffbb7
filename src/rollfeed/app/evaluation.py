"""Measuring a policy: from ``[eval]`` to numbers, with an engine that is running already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollfeed import plugins
from rollfeed.app.checks import no_images_of, reward_key_problem
from rollfeed.app.eval_sets import load_sets
from rollfeed.app.gateway import generate_fn
from rollfeed.app.model import Model
from rollfeed.app.rewards import RewardServices, label_names, reward_hub
from rollfeed.app.sources import RowChecks
from rollfeed.base.atomic import replace_file, temporary_path
from rollfeed.compat.slime_plugins import with_slime_plugins
from rollfeed.config import EvalSettings, GroupFailurePolicy, RolloutConfig, RolloutMode, RunSpec
from rollfeed.config.paths import as_paths
from rollfeed.errors import ConfigError, DataError, PluginError, RunDirectoryError, RunFailedError
from rollfeed.evaluation import (
    ANSWER_COLUMNS,
    AnswerGroup,
    EvalProgress,
    EvalResult,
    EvalSet,
    NamedEndpoint,
    Outcomes,
    SetPlan,
    TrainingDefaults,
    answer_sets,
    answers_table,
    outcomes_of_answers,
    outcomes_of_record,
    policy_versions,
    score_names,
    summarise,
)
from rollfeed.pipeline import GroupPlan, Observers
from rollfeed.pipeline.groups import EngineGate, FailureBudget, GroupRunner
from rollfeed.prompts import ChatRenderer
from rollfeed.protocols import Engine, GenerateFn, Isolation, PictureInput, RunningGroup, SampleHook, Tokenizer
from rollfeed.rewards.hub import RewardHub
from rollfeed.store.json_text import read_records, to_json
from rollfeed.store.layout import ANSWERS_FILE, EVAL_LOG, RESULT_FILE
from rollfeed.tracking import Trackers
from rollfeed.types import Group

_MAX_PROMPTS = 16_384
"""Under way at once: at the engine, or waiting for their rewards."""

_AS_IN_EVALUATION = {"group_failure": GroupFailurePolicy.RETRY, "mode": RolloutMode.SYNC}
"""Settings of ``[rollout]`` that are not those of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """Everything an evaluation is made of, read and checked; may be evaluated any number of times."""

    sets: tuple[EvalSet, ...]
    seed: int
    config: RolloutConfig
    tokenizer: Tokenizer
    folders: tuple[Path, ...] = ()
    """Where modules of functions are looked for."""
    picture_input: PictureInput | None = None
    """The way of pictures into prompts and turns."""

    @property
    def num_answers(self) -> int:
        return sum(each.num_answers for each in self.sets)


def prepare_evaluation(
    settings: EvalSettings,
    *,
    config: RolloutConfig,
    tokenizer: Tokenizer,
    context_length: int,
    folders: Sequence[str | Path] = (),
    no_images: str | None = None,
    picture_input: PictureInput | None = None,
) -> PreparedEvaluation:
    """Read and check all sets, without starting anything.

    A set takes from ``config``, what training does, whatever ``settings`` do not say. ``no_images`` says why the engine
    takes none, where that is known; ``picture_input`` brings pictures into prompts.

    Raises:
        ConfigError: If there is no set, a file or environment is wrong, keys do not fit together, or nothing can
            score a prompt: no grader, no such grader, or no label.
    """
    folders = as_paths(folders)
    config = with_slime_plugins(config, folders=folders)
    if not settings.has_sets:
        raise ConfigError("nothing to evaluate on: add [[eval.datasets]] or [[eval.environments]]")
    training = TrainingDefaults(
        sampling=config.sampling,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        rm_type=config.reward.rm_type,
        reward_key=config.reward.reward_key,
        context_length=context_length,
    )

    own = RewardServices(config.reward, rm_types=(), tools=config.tools, folders=folders)
    problems, tools = own.judges.problems(), own.toolbox

    def rows_of(plan: SetPlan) -> RowChecks:
        return RowChecks(as_in_set(config, plan), unscored=None, no_images=no_images, label_problems=problems)

    shown = {} if picture_input is None else picture_input._asdict()
    render = partial(ChatRenderer, tokenizer, tools=tools.definitions, call_format=tools.call_format, **shown)
    sets = load_sets(settings, training=training, renderer=render, folders=folders, rows_of=rows_of)
    prepared = PreparedEvaluation(
        sets=sets,
        seed=settings.seed,
        config=config,
        tokenizer=tokenizer,
        folders=tuple(folders),
        picture_input=picture_input,
    )
    _answering(prepared)
    services = _services(prepared, None)
    services.reward_model.prepare(tokenizer)
    for each in sets:
        _check_scoring(each, _hub(each, prepared, services), config)
    return prepared


def prepare_run_evaluation(spec: RunSpec, model: Model) -> PreparedEvaluation:
    """Read and check the sets of a run's ``[eval]``, as :func:`prepare_evaluation`."""
    settings = spec.settings
    prepared = prepare_evaluation(
        settings.eval,
        config=settings,
        tokenizer=model.tokenizer,
        context_length=settings.engine.context_length,
        folders=spec.folders,
        no_images=no_images_of(settings.engine, model),
        picture_input=model.picture_input,
    )
    best, names = settings.train.export_best, score_names(prepared.sets)
    if best is not None and best not in names:
        raise ConfigError(f"train.export_best = {best!r}: evaluations have no such number, but {', '.join(names)}")
    return prepared


def as_in_set(config: RolloutConfig, plan: SetPlan) -> RolloutConfig:
    """Return the settings with which the prompts of a set are answered and scored."""
    no_functions = dict.fromkeys(("reward", "batched_reward", "group_reward")) if plan.has_own_grader else {}
    rollout = {**_AS_IN_EVALUATION, "n_samples_per_prompt": plan.n_samples_per_prompt}
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "reward": config.reward.model_copy(update={"rm_type": plan.rm_type, "reward_key": plan.reward_key}),
            "plugins": config.plugins.model_copy(update=no_functions),
        }
    )


async def evaluate(
    prepared: PreparedEvaluation,
    *,
    engine: Engine,
    on_progress: Callable[[EvalProgress], None] | None = None,
    on_isolation: Callable[[Isolation], None] | None = None,
    printed: str | Path | None = None,
) -> EvalResult:
    """Answer all sets at once with an engine that has been entered, and return the numbers.

    The requests, their seeds included, are the same at every call. During training, call it between two batches: what
    aborts the engine's requests, as the end of a step does, ends an evaluation.

    ``on_progress`` is told of every answer, the same object every time; ``on_isolation`` once, when the first program
    of the policy runs. ``printed`` gets what functions print in workers.

    Raises:
        RunFailedError: If more answers fail than ``rollout.failure_budget`` allows, or requests are aborted.
    """
    started = time.monotonic()
    progress = EvalProgress(num_answers=prepared.num_answers)

    def tell() -> None:
        progress.seconds = time.monotonic() - started
        if on_progress is not None:
            on_progress(progress)

    def answered() -> None:
        progress.num_answered += 1
        tell()

    def completed(eval_set: EvalSet, group: Group) -> None:
        progress.add(eval_set, group)
        tell()

    before = engine.policy_version
    services = _services(prepared, on_isolation)
    services.workers.output = None if printed is None else Path(printed)
    async with services:
        gate = EngineGate(engine, max_requests_in_flight=prepared.config.rollout.max_requests_in_flight)
        failures = FailureBudget(prepared.config.rollout)
        observers = Observers(on_rollout=answered)
        runners = [
            _runner(each, prepared, services=services, gate=gate, failures=failures, watch=observers)
            for each in prepared.sets
        ]
        found = await answer_sets(
            list(zip(prepared.sets, _answer_with(runners, _turns(prepared, engine)), strict=True)),
            max_groups=_MAX_PROMPTS,
            on_group=completed,
        )
    failures.report()
    return EvalResult(
        sets=tuple(summarise(each, groups) for each, groups in zip(prepared.sets, found, strict=True)),
        seed=prepared.seed,
        policy_versions=policy_versions([group for groups in found for group in groups], otherwise=before),
        seconds=time.monotonic() - started,
        num_tokens=sum(runner.num_generated_tokens for runner in runners),
    )


def tell_of_evaluation(trackers: Trackers, result: EvalResult, *, step: int = 0) -> None:
    """Tell trackers of an evaluation after ``step`` batches were trained on, with samples of each set."""
    trackers.log(result.metrics(), step=step)
    for each in result.sets:
        trackers.log_samples(each.groups, step=step, name=f"eval/{each.name}/samples", reward_key=each.reward_key)


def check_eval_output(folder: Path, *, overwrite: bool) -> None:
    """Make the folder of an evaluation's files.

    Raises:
        RunDirectoryError: If it cannot be written, or has results that are not to be replaced.
    """
    found = [name for name in (RESULT_FILE, ANSWERS_FILE) if (folder / name).exists()]
    if found and not overwrite:
        raise RunDirectoryError(f"{folder / found[0]}: exists already; give another --out, or --overwrite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = temporary_path(folder / RESULT_FILE)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunDirectoryError(f"{folder}: cannot be written: {error.strerror}; give another --out") from error


def write_evaluation(result: EvalResult, folder: Path, *, about: Mapping[str, Any] | None = None) -> None:
    """Put the numbers into ``eval.json`` and every answer into ``answers.parquet``; neither is ever half there.

    ``about`` are further entries of the JSON file.

    Raises:
        RunFailedError: If the disk does not take them.
    """
    text = to_json({**(about or {}), **result.summary()}, "the evaluation")
    table = answers_table(result)
    try:
        replace_file(folder / ANSWERS_FILE, lambda file: pq.write_table(table, file))
        replace_file(folder / RESULT_FILE, lambda file: file.write(text.encode() + b"\n"))
    except OSError as error:
        raise RunFailedError(f"{folder}: the results cannot be written: {error.strerror}") from error


def read_outcomes(folder: Path) -> Outcomes:
    """Return what an evaluation found: that of ``rollfeed eval`` in a folder, or the last of a run that trains.

    Raises:
        DataError: If there is none in it, or it cannot be read.
    """
    try:
        if (folder / ANSWERS_FILE).is_file():
            return outcomes_of_answers(pq.read_table(folder / ANSWERS_FILE, columns=list(ANSWER_COLUMNS)).to_pylist())
        if (folder / EVAL_LOG).is_file():
            if records := read_records(folder / EVAL_LOG):
                return outcomes_of_record(records[-1])
            raise ValueError("no whole line")
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{folder}: its evaluation cannot be read ({error}); make it again") from error
    raise DataError(f"{folder}: no {ANSWERS_FILE} of rollfeed eval and no {EVAL_LOG} of rollfeed train is in it")


def _answering(prepared: PreparedEvaluation) -> tuple[GenerateFn, SampleHook | None]:
    """Return what answers, and what sees the answers."""
    own, load = prepared.config.plugins, partial(plugins.load_plugin, folders=prepared.folders)
    generate = load(own.generate, GenerateFn, key="plugins.generate") or generate_fn(
        prepared.config, folders=prepared.folders, evaluation=True
    )
    return generate, load(own.sample_hook, SampleHook, key="plugins.sample_hook")


def _services(prepared: PreparedEvaluation, on_isolation: Callable[[Isolation], None] | None) -> RewardServices:
    services = RewardServices(
        prepared.config.reward,
        rm_types=[each.plan.rm_type for each in prepared.sets],
        tools=prepared.config.tools,
        folders=prepared.folders,
        deterministic=prepared.config.rollout.deterministic,
    )
    services.on_isolation, services.picture_input = on_isolation, prepared.picture_input
    return services


def _hub(eval_set: EvalSet, prepared: PreparedEvaluation, services: RewardServices) -> RewardHub:
    config = as_in_set(prepared.config, eval_set.plan)
    try:
        return reward_hub(
            config.reward,
            config.plugins,
            services,
            label_names=label_names(prepared.config),
            seed=eval_set.seed(prepared.seed),
            folders=prepared.folders,
        )
    except PluginError:
        raise
    except ConfigError as error:
        raise ConfigError(f"eval set {eval_set.name}: {error}") from None


def _check_scoring(eval_set: EvalSet, hub: RewardHub, config: RolloutConfig) -> None:
    """Refuse a set with a prompt that nothing can score."""
    if not eval_set.plan.has_own_grader and config.plugins.has_reward:
        return
    for prompt in eval_set.prompts:
        where = f"eval set {eval_set.name}, prompt {prompt.prompt_id}"
        if prompt.metadata.get("reward_fn") is not None:
            continue
        rm_type = prompt.metadata.get("rm_type", eval_set.plan.rm_type)
        if rm_type is None:
            raise ConfigError(f"{where}: nothing scores it: set rm_type of the set or of [eval], or plugins.reward")
        if problem := hub.problem(rm_type):
            raise ConfigError(f"{where}: {problem}")
        judge = config.reward.judge_of(rm_type)
        if judge is not None and judge.compares_group and eval_set.plan.n_samples_per_prompt == 1:
            raise ConfigError(
                f"{where}: {rm_type} compares the answers of a group, and n_samples_per_prompt = 1 there: raise it"
            )
        own_key, key = prompt.metadata.get("reward_key"), eval_set.plan.reward_key
        is_of_others = own_key is not None or key == config.reward.reward_key
        if problem := reward_key_problem(own_key or key, rm_type, is_of_others=is_of_others):
            raise ConfigError(f"{where}: {problem}")


def _runner(
    eval_set: EvalSet,
    prepared: PreparedEvaluation,
    *,
    services: RewardServices,
    gate: EngineGate,
    failures: FailureBudget,
    watch: Observers,
) -> GroupRunner:
    config, plan = as_in_set(prepared.config, eval_set.plan), eval_set.plan
    generate, sample_hook = _answering(prepared)
    return GroupRunner(
        GroupPlan(
            settings=config.rollout,
            seed=eval_set.seed(prepared.seed),
            params=plan.params,
            max_context_length=plan.max_context_length,
            generate_fn=generate,
            services=services.for_generating(NamedEndpoint(gate, eval_set.name), prepared.tokenizer, config=config),
            scorer=_hub(eval_set, prepared, services),
            sample_hook=sample_hook,
            evaluation=True,
        ),
        gate=gate,
        failures=failures,
        observer=watch,
    )


def _answer_with(runners: Sequence[GroupRunner], turns: asyncio.Semaphore) -> list[AnswerGroup]:
    """Return what answers the prompts of each set; a turn is held while the engine is needed, and not for rewards."""

    async def answer(runner: GroupRunner, group: Group) -> Group:
        running = RunningGroup.of(group, n_samples_per_prompt=runner.n_samples_per_prompt, policy_version=0)
        await turns.acquire()
        # Step 0 always: the seeds of the answers depend on it, and every evaluation asks the same.
        return await runner.run(running, step=0, on_generated=turns.release)

    return [partial(answer, runner) for runner in runners]


def _turns(prepared: PreparedEvaluation, engine: Engine) -> asyncio.Semaphore:
    """Return turns for as many prompts as keep the engine full; more would only wait at its gate."""
    fewest = min(each.plan.n_samples_per_prompt for each in prepared.sets)
    wanted = prepared.config.rollout.max_requests_in_flight or 2 * engine.max_running_requests
    return asyncio.Semaphore(max(len(prepared.sets), -(-wanted // fewest)))
