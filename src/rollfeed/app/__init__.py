"""The one place where objects are made: from settings to a run.

Invariants: same settings, same seed and a deterministic engine give byte-identical batches; leaving
a run, by error or by signal, leaves no task, thread, socket or half-written file.
"""

from rollfeed.app.agents import agent_rollout_to_sample, generate_rollout_batch
from rollfeed.app.build import Functions, PreparedRun, load_functions, load_trackers, open_rollouts, prepare
from rollfeed.app.calibration import calibrate_environments
from rollfeed.app.environments.adaptive import check_adaptive_environments
from rollfeed.app.evaluation import (
    PreparedEvaluation,
    check_eval_output,
    evaluate,
    prepare_evaluation,
    prepare_run_evaluation,
    read_outcomes,
    tell_of_evaluation,
    write_evaluation,
)
from rollfeed.app.model import Endpoint, Model, build_engine, keep_server_logs, load_model, load_settings_model
from rollfeed.app.replay import StepReplay, answer_reader, replay_run
from rollfeed.app.rewards import check_isolation, grade_rows, label_names, score_file
from rollfeed.app.runs import RunSummary, run, run_problem, tracked
from rollfeed.app.sources import environment_source, overlaps, source_names
from rollfeed.app.stored_run import stored_folders, stored_spec
from rollfeed.app.training import directory_problem, prepare_warm_up, train

__all__ = [
    "Endpoint",
    "Functions",
    "Model",
    "PreparedEvaluation",
    "PreparedRun",
    "RunSummary",
    "StepReplay",
    "agent_rollout_to_sample",
    "answer_reader",
    "build_engine",
    "calibrate_environments",
    "check_adaptive_environments",
    "check_eval_output",
    "check_isolation",
    "directory_problem",
    "environment_source",
    "evaluate",
    "generate_rollout_batch",
    "grade_rows",
    "keep_server_logs",
    "label_names",
    "load_functions",
    "load_model",
    "load_settings_model",
    "load_trackers",
    "open_rollouts",
    "overlaps",
    "prepare",
    "prepare_evaluation",
    "prepare_run_evaluation",
    "prepare_warm_up",
    "read_outcomes",
    "replay_run",
    "run",
    "run_problem",
    "score_file",
    "source_names",
    "stored_folders",
    "stored_spec",
    "tell_of_evaluation",
    "tracked",
    "train",
    "write_evaluation",
]
