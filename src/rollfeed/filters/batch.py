"""Over-sampling filters: which of more groups than needed make a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rollfeed.errors import ConfigError, suggestion
from rollfeed.protocols import BatchFilter
from rollfeed.types import Group


def most_reward_std(groups: Sequence[Group], *, reward_key: str | None) -> list[int]:
    """Take the groups whose rewards differ most: there is most to learn from them.

    Groups of equal spread stay in the order of their indices.
    """
    return _ascending([-float(group.reward_values(reward_key).std()) for group in groups])


def balanced_length(groups: Sequence[Group], *, reward_key: str | None) -> list[int]:
    """Take the groups whose mean response length is nearest to that of all groups.

    Batches are then equally long for the trainer, at the price of the extremes, which are not trained on at all.
    """
    del reward_key
    lengths = np.array([group.response_tokens / max(1, len(group.rollouts)) for group in groups], np.float64)
    return _ascending(np.abs(lengths - lengths.mean()).tolist() if len(lengths) else [])


_BATCH_FILTERS = {"length_balance": balanced_length, "reward_std": most_reward_std}


def build_batch_filter(name: str, parameters: Mapping[str, Any], *, reward_key: str | None) -> BatchFilter:
    """Make a built-in over-sampling filter.

    Raises:
        ConfigError: If there is none of that name, or it is given a parameter.
    """
    if name not in _BATCH_FILTERS:
        raise ConfigError(f"filter {name!r}: unknown filter; {suggestion(name, list(_BATCH_FILTERS))}")
    if parameters:
        raise ConfigError(f"filter {name}: {next(iter(parameters))}: unknown parameter; it has none")
    return partial(_BATCH_FILTERS[name], reward_key=reward_key)


def _ascending(values: Sequence[float]) -> list[int]:
    return [int(index) for index in np.argsort(values, kind="stable")]
