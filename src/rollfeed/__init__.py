"""Rollouts for reinforcement learning of language models, and their way to the trainer.

What a program needs is offered here; ``rollfeed.types`` has the records and ``rollfeed.protocols``
the extension points.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollfeed.app import (
        Endpoint,
        Model,
        agent_rollout_to_sample,
        build_engine,
        environment_source,
        evaluate,
        generate_rollout_batch,
        grade_rows,
        load_model,
        open_rollouts,
        prepare,
        prepare_evaluation,
        run,
        score_file,
        train,
    )
    from rollfeed.config import (
        EngineSettings,
        EvalSettings,
        PluginSettings,
        RewardSettings,
        RolloutConfig,
        RolloutSettings,
        RunSpec,
        SamplingSettings,
        Settings,
    )
    from rollfeed.types import Drop, Keep, TrainBatch, Verdict

__version__ = "0.1.0"

__all__ = [
    "Drop",
    "Endpoint",
    "EngineSettings",
    "EvalSettings",
    "Keep",
    "Model",
    "PluginSettings",
    "RewardSettings",
    "RolloutConfig",
    "RolloutSettings",
    "RunSpec",
    "SamplingSettings",
    "Settings",
    "TrainBatch",
    "Verdict",
    "agent_rollout_to_sample",
    "build_engine",
    "environment_source",
    "evaluate",
    "generate_rollout_batch",
    "grade_rows",
    "load_model",
    "open_rollouts",
    "prepare",
    "prepare_evaluation",
    "run",
    "score_file",
    "train",
]


def __getattr__(name: str) -> Any:
    # Names are fetched on first use, so that a worker which needs one module does not load all of them.
    from importlib import import_module

    for home in ("types", "config", "app") if name in __all__ else ():  # each imports those before it
        module = import_module(f"rollfeed.{home}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module 'rollfeed' has no attribute {name!r}")
