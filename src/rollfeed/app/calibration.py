"""Measures how hard environments are for a model, level by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollfeed.app.environments.task_makers import one_worker
from rollfeed.app.evaluation import PreparedEvaluation, evaluate, prepare_evaluation
from rollfeed.app.model import Model, build_engine
from rollfeed.config import EngineSettings, EvalEnvironmentSettings, EvalSettings, RolloutConfig, SamplingSettings
from rollfeed.errors import ConfigError
from rollfeed.evaluation import Calibration, EvalProgress, LevelResult
from rollfeed.protocols import AnswerMarker, Engine, PromptPreprocessor


async def calibrate_environments(
    levels: Mapping[str, Sequence[int]],
    *,
    model: Model,
    num_samples: int,
    sampling: SamplingSettings | None = None,
    seed: int = 0,
    parameters: Mapping[str, Any] | None = None,
    apply_chat_template: bool = True,
    preprocessor: PromptPreprocessor | None = None,
    marker: AnswerMarker | None = None,
    engine_settings: EngineSettings | None = None,
    engine: Engine | None = None,
    folders: Sequence[Path] = (),
    on_progress: Callable[[EvalProgress], None] | None = None,
) -> tuple[Calibration, ...]:
    """Measure a model on levels of environments, by id, all at once, each problem answered once.

    The problems are of the split ``probe``, apart from those that are trained and evaluated on.

    Each level has ``num_samples`` problems; levels that cannot be asked are left out and told, unless none can be.
    The engine is started and ended here; by default it is the one that ``engine_settings`` describe, and ``sampling``
    is as in training. ``parameters`` are of all environments.

    Raises:
        ConfigError: If there is no such environment or parameter, or no level can be asked; nothing has been started.
        RollfeedError: If the engine or too many gradings fail.
    """
    engine = engine or build_engine(model, engine_settings)
    config = RolloutConfig(sampling=sampling or SamplingSettings())
    settings = EvalSettings(
        seed=seed,
        num_prompts=num_samples,
        n_samples_per_prompt=1,
        apply_chat_template=apply_chat_template,
        custom_prompt_preprocessor=preprocessor,
        answer_marker_type=marker,
    )

    def prepare(environment_id: str, level: int) -> PreparedEvaluation:
        keys = {"id": environment_id, "level": level, "parameters": dict(parameters or {}), "split": "probe"}
        of_level = settings.model_copy(update={"environments": (EvalEnvironmentSettings.model_validate(keys),)})
        length, tokenizer = engine.context_length, model.tokenizer
        return prepare_evaluation(of_level, config=config, tokenizer=tokenizer, context_length=length, folders=folders)

    prepared, unusable = _prepared(levels, prepare)
    together = replace(next(iter(prepared.values())), sets=tuple(each.sets[0] for each in prepared.values()))
    async with engine:
        result = await evaluate(together, engine=engine, on_progress=on_progress)
    found = dict(zip(prepared, result.sets, strict=True))
    return tuple(
        Calibration(
            environment_id=name,
            levels=tuple(LevelResult(level=level, found=each) for (of, level), each in found.items() if of == name),
            unusable={level: str(error) for (of, level), error in unusable.items() if of == name},
            seconds=result.seconds,
        )
        for name in levels
    )


def _prepared(
    levels: Mapping[str, Sequence[int]], prepare: Callable[[str, int], PreparedEvaluation]
) -> tuple[dict[tuple[str, int], PreparedEvaluation], dict[tuple[str, int], ConfigError]]:
    """Return what is prepared of each level, and the errors of those that cannot be."""
    prepared: dict[tuple[str, int], PreparedEvaluation] = {}
    unusable: dict[tuple[str, int], ConfigError] = {}
    with one_worker():
        for environment_id, chosen in levels.items():
            for level in sorted(chosen):
                try:
                    prepared[environment_id, level] = prepare(environment_id, level)
                except ConfigError as error:
                    unusable[environment_id, level] = error
    if not prepared:
        raise next(iter(unusable.values()))
    return prepared, unusable
