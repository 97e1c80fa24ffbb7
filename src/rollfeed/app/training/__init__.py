"""Training: the loop, what comes before it, and what it leaves in the run directory."""

from rollfeed.app.training.checkpoints import where_it_goes_on
from rollfeed.app.training.checks import (
    check_trained_model,
    check_trained_prompts,
    check_training,
    directory_problem,
    tell_of_correction,
)
from rollfeed.app.training.logs import run_curves
from rollfeed.app.training.loop import OnEvaluation, TrainedStep, make_trainer, train
from rollfeed.app.training.warm_up import WarmUp, WarmUpProbe, prepare_warm_up

__all__ = [
    "OnEvaluation",
    "TrainedStep",
    "WarmUp",
    "WarmUpProbe",
    "check_trained_model",
    "check_trained_prompts",
    "check_training",
    "directory_problem",
    "make_trainer",
    "prepare_warm_up",
    "run_curves",
    "tell_of_correction",
    "train",
    "where_it_goes_on",
]
