"""Measures how hard environments are for a model, level by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.app.evaluation import evaluate, prepare_evaluation
from rollfeed.app.model import Model, build_engine
from rollfeed.config import EngineSettings, EvalEnvironmentSettings, EvalSettings, RolloutConfig, SamplingSettings
from rollfeed.evaluation import Calibration, EvalProgress, LevelResult
from rollfeed.protocols import Engine, PromptPreprocessor


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
    engine_settings: EngineSettings | None = None,
    engine: Engine | None = None,
    folders: Sequence[Path] = (),
    on_progress: Callable[[EvalProgress], None] | None = None,
) -> tuple[Calibration, ...]:
    """Measure a model on levels of environments, by id, all at once, each problem answered once.

    The problems are of the split ``probe``, apart from those that are trained and evaluated on.

    Each level has ``num_samples`` problems. The engine is started and ended here; by default it is the one that
    ``engine_settings`` describe, and ``sampling`` is as in training. ``parameters`` are of all environments.

    Raises:
        ConfigError: If there is no such environment, level or parameter; nothing has been started.
        RollfeedError: If the engine or too many gradings fail.
    """
    settings = EvalSettings(
        seed=seed,
        num_prompts=num_samples,
        n_samples_per_prompt=1,
        apply_chat_template=apply_chat_template,
        custom_prompt_preprocessor=preprocessor,
        environments=tuple(
            EvalEnvironmentSettings(id=environment_id, level=level, parameters=dict(parameters or {}), split="probe")
            for environment_id, chosen in levels.items()
            for level in sorted(chosen)
        ),
    )
    engine = engine or build_engine(model, engine_settings)
    config = RolloutConfig(sampling=sampling or SamplingSettings())
    prepared = prepare_evaluation(
        settings, config=config, tokenizer=model.tokenizer, context_length=engine.context_length, folders=folders
    )
    async with engine:
        result = await evaluate(prepared, engine=engine, on_progress=on_progress)
    found = list(zip(settings.environments, result.sets, strict=True))
    return tuple(
        Calibration(
            environment_id=environment_id,
            levels=tuple(
                LevelResult(level=each.level, found=numbers) for each, numbers in found if each.id == environment_id
            ),
            seconds=result.seconds,
        )
        for environment_id in levels
    )
