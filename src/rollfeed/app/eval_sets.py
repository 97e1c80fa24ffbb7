"""From ``[eval]`` to sets: files and problems read whole, so that every evaluation asks the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rollfeed.app.environments.task_makers import ChosenEnvironment, MakingPlan, ask_source, one_worker
from rollfeed.app.environments.ways_of_asking import asked_marker, asking, check_asking
from rollfeed.app.sources import RowChecks, find_file
from rollfeed.config import EvalDatasetSettings, EvalEnvironmentSettings, EvalSettings
from rollfeed.environments import EnvironmentSource
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.evaluation import DEFAULT_NUM_PROBLEMS, EvalSet, SetPlan, TrainingDefaults, plan_set, without_repeats
from rollfeed.prompts import ChatRenderer, ColumnKeys, load_prompts
from rollfeed.types import Prompt

_log = logging.getLogger(__name__)

MakeRenderer: TypeAlias = Callable[..., ChatRenderer]
"""Makes what renders the prompts of a set, given its ``rollout_max_prompt_len``."""


@one_worker()
def load_sets(
    settings: EvalSettings,
    *,
    training: TrainingDefaults,
    renderer: MakeRenderer,
    folders: Sequence[Path],
    rows_of: Callable[[SetPlan], RowChecks],
) -> tuple[EvalSet, ...]:
    """Return all sets: environments, then files, each in the order of the settings.

    Raises:
        ConfigError: If a set cannot be made; one line that names it.
    """
    making = MakingPlan.alone(folders=folders)
    sets: list[EvalSet] = []
    for environment in settings.environments:
        name = environment.name or f"{environment.id}@{environment.level}"
        plan = plan_set(name, environment, settings, training)
        plan = replace(plan, num_prompts=plan.num_prompts or DEFAULT_NUM_PROBLEMS)
        asks = renderer if rows_of(plan).no_images is None else partial(renderer, loader=None, pictures=None)
        sets.append(_environment_set(name, environment, plan, making, asks, seed=settings.seed))
    for dataset in settings.datasets:
        plan = plan_set(dataset.name or dataset.path, dataset, settings, training)
        sets.append(_dataset_set(dataset, settings, plan, renderer, folders, rows_of(plan)))
    names = [each.name for each in sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two eval sets are called {twice[0]!r}: give one of them another name")
    return tuple(sets)


def _environment_set(
    name: str,
    chosen: EvalEnvironmentSettings,
    plan: SetPlan,
    making: MakingPlan,
    renderer: MakeRenderer,
    *,
    seed: int,
) -> EvalSet:
    try:
        prompts, num_over_length = _problems(chosen, plan, making, renderer, seed=seed)
    except (ConfigError, RunFailedError) as error:
        raise ConfigError(f"eval set {name}: {error}") from None
    made = EvalSet(name=name, prompts=tuple(prompts), plan=plan, num_over_length=num_over_length)
    _tell_what_is_not_there(made)
    return made


def _problems(
    chosen: EvalEnvironmentSettings, plan: SetPlan, making: MakingPlan, renderer: MakeRenderer, *, seed: int
) -> tuple[list[Prompt], int]:
    (maker,) = making.make([ChosenEnvironment(chosen.id, chosen.parameters)], seed=seed)
    check_asking(maker.facts, chosen, plan)
    source = EnvironmentSource(
        maker,
        level=chosen.level,
        seed=seed,
        renderer=renderer(rollout_max_prompt_len=plan.max_prompt_length, **asking(plan)),
        split=chosen.split,
        apply_chat_template=plan.apply_chat_template,
    )
    count = plan.num_prompts or DEFAULT_NUM_PROBLEMS

    async def draw() -> list[Prompt]:
        await source.check()
        return await source.draw_different(count)

    return ask_source(source, draw), source.num_over_length


def _dataset_set(
    chosen: EvalDatasetSettings,
    defaults: EvalSettings,
    plan: SetPlan,
    renderer: MakeRenderer,
    folders: Sequence[Path],
    checks: RowChecks,
) -> EvalSet:
    def column(key: str) -> Any:
        own = getattr(chosen, key)
        return getattr(defaults, key) if own is None else own

    unlabelled: dict[str, str] = {}

    def note(prompt: Prompt, rm_type: str) -> None:
        unlabelled[prompt.prompt_id] = rm_type

    names = ("template", "label_key", "metadata_key", "tools_key", "image_key", "video_key")
    keys = {key: column(key) for key in names}
    keys["metadata_columns"] = column("metadata_columns") or ()
    try:
        loaded = load_prompts(
            str(find_file(chosen.path, folders)),
            name=chosen.name,
            split=chosen.split,
            renderer=renderer(rollout_max_prompt_len=plan.max_prompt_length, **asking(plan)),
            keys=ColumnKeys(input_key=column("input_key") or "prompt", **keys),
            apply_chat_template=plan.apply_chat_template,
            check_row=checks.of(chosen.path, label_key=keys["label_key"], unlabelled=note, marker=asked_marker(plan)),
            no_images=checks.no_images,
            skip_bad_rows=False,  # without some of its rows it is another set
        )
    except ConfigError as error:
        message = str(error).removesuffix(", or set skip_bad_rows = true")
        raise type(error)(f"eval set {chosen.name or chosen.path}: {message}") from None
    different = without_repeats(loaded.prompts)
    prompts = tuple(different[: plan.num_prompts])
    for prompt in (*prompts, *loaded.prompts[: plan.num_prompts]):
        if (rm_type := unlabelled.get(prompt.prompt_id)) is not None:
            raise ConfigError(
                f"eval set {loaded.name}, prompt {prompt.prompt_id}: has no label, and rm_type {rm_type!r} needs one: "
                "set label_key of the set"
            )
    made = EvalSet(
        name=loaded.name,
        prompts=prompts,
        plan=plan,
        num_over_length=loaded.num_over_length,
        num_repeats=len(loaded.prompts) - len(different),
    )
    _tell_what_is_not_there(made)
    return made


def _tell_what_is_not_there(made: EvalSet) -> None:
    """Warn of prompts that are left out, or fewer than were asked for."""
    if made.num_over_length:
        _log.warning(
            "eval set %s: %d prompts are over %d tokens and are left out",
            made.name,
            made.num_over_length,
            made.plan.max_prompt_length,
        )
    if made.num_repeats:
        _log.warning(
            "eval set %s: %d prompts ask what an earlier one asks and are left out; for more answers to each prompt "
            "set n_samples_per_prompt",
            made.name,
            made.num_repeats,
        )
    if made.num_missing:
        _log.warning(
            "eval set %s: has %d prompts, of %d that were asked for: there are no more that differ",
            made.name,
            len(made.prompts),
            made.plan.num_prompts,
        )
