"""Dynamic-sampling filters, by name and as classes: they keep the groups that teach something."""

from rollfeed.filters.batch import build_batch_filter
from rollfeed.filters.registry import build_filter, compose, filter_parameters
from rollfeed.filters.rules import (
    AllCorrect,
    AllWrong,
    AnySuccess,
    AtLeastHalfCorrect,
    CompleteGroup,
    MinimumReward,
    QualityAndDiversity,
    ResponseDiversity,
    ResponseLength,
    RewardStd,
    TruncatedFraction,
)

__all__ = [
    "AllCorrect",
    "AllWrong",
    "AnySuccess",
    "AtLeastHalfCorrect",
    "CompleteGroup",
    "MinimumReward",
    "QualityAndDiversity",
    "ResponseDiversity",
    "ResponseLength",
    "RewardStd",
    "TruncatedFraction",
    "build_batch_filter",
    "build_filter",
    "compose",
    "filter_parameters",
]
