"""Measuring a policy: sets, their answers, and the numbers of them."""

from rollfeed.evaluation.answers import ANSWERS_SCHEMA, answers_table
from rollfeed.evaluation.calibration import Calibration, LevelResult
from rollfeed.evaluation.change import log_record
from rollfeed.evaluation.keys import DEFAULT_NUM_PROBLEMS, SetPlan, TrainingDefaults, plan_set
from rollfeed.evaluation.results import EvalResult, SetResult, is_right, summarise
from rollfeed.evaluation.running import AnswerGroup, EvalProgress, NamedEndpoint, answer_sets, policy_versions
from rollfeed.evaluation.sets import EvalSet, what_is_asked, without_repeats
from rollfeed.evaluation.statistics import (
    Interval,
    cluster_interval,
    paired_interval,
    pass_at_k,
    pass_hat_k,
    powers_of_two,
    wilson_interval,
)

__all__ = [
    "ANSWERS_SCHEMA",
    "DEFAULT_NUM_PROBLEMS",
    "AnswerGroup",
    "Calibration",
    "EvalProgress",
    "EvalResult",
    "EvalSet",
    "Interval",
    "LevelResult",
    "NamedEndpoint",
    "SetPlan",
    "SetResult",
    "TrainingDefaults",
    "answer_sets",
    "answers_table",
    "cluster_interval",
    "is_right",
    "log_record",
    "paired_interval",
    "pass_at_k",
    "pass_hat_k",
    "plan_set",
    "policy_versions",
    "powers_of_two",
    "summarise",
    "what_is_asked",
    "wilson_interval",
    "without_repeats",
]
