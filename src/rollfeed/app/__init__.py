"""The one place where objects are made: from settings to a run.

Invariants: same settings, same seed and a deterministic engine give byte-identical batches; leaving
a run, by error or by signal, leaves no task, thread, socket or half-written file.
"""

from rollfeed.app.calibration import Calibration, LevelResult, calibrate_environment
from rollfeed.app.evaluation import (
    EvalProgress,
    PreparedEvaluation,
    check_eval_output,
    evaluate,
    prepare_evaluation,
    write_evaluation,
)
from rollfeed.app.model import Model, build_engine, load_model, load_settings_model
from rollfeed.app.rewards import check_isolation, open_reward_hub
from rollfeed.app.rollouts import open_rollouts
from rollfeed.app.runs import (
    PreparedRun,
    RunSummary,
    build_config,
    prepare,
    resume,
    run,
    run_problem,
)
from rollfeed.app.scoring import grade_rows, score_file
from rollfeed.app.sources import build_source, environment_source, source_names
from rollfeed.app.sources.end_of_data import DataLimit
from rollfeed.app.sources.overlap import overlaps
from rollfeed.app.sources.rows import no_images_of
from rollfeed.app.stored_run import chosen_of_stored, stored_settings
from rollfeed.app.training import (
    TrainedStep,
    check_trained_model,
    check_trained_prompts,
    check_training,
    directory_problem,
    prepare_warm_up,
    tell_of_correction,
    train,
)

__all__ = [
    "Calibration",
    "DataLimit",
    "EvalProgress",
    "LevelResult",
    "Model",
    "PreparedEvaluation",
    "PreparedRun",
    "RunSummary",
    "TrainedStep",
    "build_config",
    "build_engine",
    "build_source",
    "calibrate_environment",
    "check_eval_output",
    "check_isolation",
    "check_trained_model",
    "check_trained_prompts",
    "check_training",
    "chosen_of_stored",
    "directory_problem",
    "environment_source",
    "evaluate",
    "grade_rows",
    "load_model",
    "load_settings_model",
    "no_images_of",
    "open_reward_hub",
    "open_rollouts",
    "overlaps",
    "prepare",
    "prepare_evaluation",
    "prepare_warm_up",
    "resume",
    "run",
    "run_problem",
    "score_file",
    "source_names",
    "stored_settings",
    "tell_of_correction",
    "train",
    "write_evaluation",
]
