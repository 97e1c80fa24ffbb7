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

_HOMES = {
    "app": (
        "Endpoint",
        "Model",
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
    ),
    "config": (
        "EngineSettings",
        "EvalSettings",
        "PluginSettings",
        "RewardSettings",
        "RolloutConfig",
        "RolloutSettings",
        "RunSpec",
        "SamplingSettings",
        "Settings",
    ),
    "types": ("Drop", "Keep", "TrainBatch", "Verdict"),
}

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

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rollfeed.{home}"), name)
    raise AttributeError(f"module 'rollfeed' has no attribute {name!r}")
