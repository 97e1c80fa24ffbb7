"""Measuring a policy: sets, their answers, and the numbers of them."""

from rollfeed.evaluation.calibration import Calibration, LevelResult
from rollfeed.evaluation.paired import (
    ANSWER_COLUMNS,
    Outcomes,
    SetComparison,
    compare,
    outcomes_of_answers,
    outcomes_of_record,
)
from rollfeed.evaluation.results import (
    ANSWERS_SCHEMA,
    EvalResult,
    SetResult,
    answers_table,
    is_right,
    log_record,
    score_names,
    scores_of_record,
    summarise,
)
from rollfeed.evaluation.running import AnswerGroup, EvalProgress, NamedEndpoint, answer_sets, policy_versions
from rollfeed.evaluation.sets import (
    DEFAULT_NUM_PROBLEMS,
    EvalSet,
    SetPlan,
    TrainingDefaults,
    plan_set,
    without_repeats,
)
from rollfeed.evaluation.statistics import Interval

__all__ = [
    "ANSWERS_SCHEMA",
    "ANSWER_COLUMNS",
    "DEFAULT_NUM_PROBLEMS",
    "AnswerGroup",
    "Calibration",
    "EvalProgress",
    "EvalResult",
    "EvalSet",
    "Interval",
    "LevelResult",
    "NamedEndpoint",
    "Outcomes",
    "SetComparison",
    "SetPlan",
    "SetResult",
    "TrainingDefaults",
    "answer_sets",
    "answers_table",
    "compare",
    "is_right",
    "log_record",
    "outcomes_of_answers",
    "outcomes_of_record",
    "plan_set",
    "policy_versions",
    "score_names",
    "scores_of_record",
    "summarise",
    "without_repeats",
]
