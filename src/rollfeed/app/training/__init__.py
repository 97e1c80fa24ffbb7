"""Training: the loop, what comes before it, and what it leaves in the run directory."""

from rollfeed.app.training.directory import directory_problem, run_curves, where_it_goes_on
from rollfeed.app.training.loop import TrainedStep, train
from rollfeed.app.training.trainers import make_trainer
from rollfeed.app.training.warm_up import WarmUp, prepare_warm_up

__all__ = [
    "TrainedStep",
    "WarmUp",
    "directory_problem",
    "make_trainer",
    "prepare_warm_up",
    "run_curves",
    "train",
    "where_it_goes_on",
]
