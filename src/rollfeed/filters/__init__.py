"""Which groups teach something: the dynamic-sampling filters, by name and as classes."""

from rollfeed.filters.batch import BATCH_FILTERS, BalancedLength, MostRewardStd, build_batch_filter
from rollfeed.filters.compose import ComposedFilter, compose
from rollfeed.filters.group_rule import GroupRule, Member, ResponseRule, RewardRule, members_of
from rollfeed.filters.registry import FILTERS, build_filter, filter_names, filter_parameters
from rollfeed.filters.responses import (
    AnySuccess,
    CompleteGroup,
    QualityAndDiversity,
    ResponseDiversity,
    ResponseLength,
    TruncatedFraction,
)
from rollfeed.filters.rewards import AllCorrect, AllWrong, AtLeastHalfCorrect, MinimumReward, RewardStd

__all__ = [
    "BATCH_FILTERS",
    "FILTERS",
    "AllCorrect",
    "AllWrong",
    "AnySuccess",
    "AtLeastHalfCorrect",
    "BalancedLength",
    "CompleteGroup",
    "ComposedFilter",
    "GroupRule",
    "Member",
    "MinimumReward",
    "MostRewardStd",
    "QualityAndDiversity",
    "ResponseDiversity",
    "ResponseLength",
    "ResponseRule",
    "RewardRule",
    "RewardStd",
    "TruncatedFraction",
    "build_batch_filter",
    "build_filter",
    "compose",
    "filter_names",
    "filter_parameters",
    "members_of",
]
