"""Measures how hard an environment is for a model, level by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollfeed.app.evaluation import evaluate, prepare_evaluation
from rollfeed.app.model import Model, build_engine
from rollfeed.config import EngineSettings, EvalEnvironmentSettings, EvalSettings, RolloutConfig, SamplingSettings
from rollfeed.evaluation import Calibration, EvalProgress, LevelResult
from rollfeed.protocols import Engine


async def calibrate_environment(
    environment_id: str,
    *,
    model: Model,
    levels: Sequence[int],
    num_samples: int,
    sampling: SamplingSettings | None = None,
    seed: int = 0,
    parameters: Mapping[str, Any] | None = None,
    apply_chat_template: bool = True,
    engine_settings: EngineSettings | None = None,
    engine: Engine | None = None,
    on_progress: Callable[[EvalProgress], None] | None = None,
) -> Calibration:
    """Measure a model on levels of an environment, all at once, each problem answered once.

    The problems are of the split ``probe``, apart from those that are trained and evaluated on.

    Each level has ``num_samples`` problems. The engine is started and ended here; by default it is the one that
    ``engine_settings`` describe, and ``sampling`` is as in training.

    Raises:
        ConfigError: If there is no such environment, level or parameter; nothing has been started.
        RollfeedError: If the engine or too many gradings fail.
    """
    settings = EvalSettings(
        seed=seed,
        num_prompts=num_samples,
        n_samples_per_prompt=1,
        apply_chat_template=apply_chat_template,
        environments=tuple(
            EvalEnvironmentSettings(id=environment_id, level=level, parameters=dict(parameters or {}), split="probe")
            for level in sorted(levels)
        ),
    )
    engine = engine or build_engine(model, engine_settings)
    config = RolloutConfig(sampling=sampling or SamplingSettings())
    prepared = prepare_evaluation(
        settings, config=config, tokenizer=model.tokenizer, context_length=engine.context_length
    )
    async with engine:
        result = await evaluate(prepared, engine=engine, on_progress=on_progress)
    return Calibration(
        levels=tuple(
            LevelResult(level=each.level, found=found)
            for each, found in zip(settings.environments, result.sets, strict=True)
        ),
        seconds=result.seconds,
    )
