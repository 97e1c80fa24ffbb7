"""Over-sampling filters: which of more groups than needed make a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError, suggestion
from rollfeed.protocols import BatchFilter
from rollfeed.types import Group


@dataclass(frozen=True, kw_only=True)
class MostRewardStd:
    """Take the groups whose rewards differ most: there is most to learn from them.

    Groups of equal spread stay in the order of their indices.
    """

    reward_key: str | None

    def __call__(self, groups: Sequence[Group]) -> list[int]:
        spreads = [float(group.reward_values(self.reward_key).std()) for group in groups]
        return _ascending(np.array([-spread for spread in spreads]))


@dataclass(frozen=True, kw_only=True)
class BalancedLength:
    """Take the groups whose mean response length is nearest to that of all groups.

    Batches are then equally long for the trainer, at the price of the extremes, which are not trained on at all.
    """

    reward_key: str | None

    def __call__(self, groups: Sequence[Group]) -> list[int]:
        lengths = np.array([group.response_tokens / max(1, len(group.rollouts)) for group in groups], np.float64)
        return _ascending(np.abs(lengths - lengths.mean()) if len(lengths) else lengths)


BATCH_FILTERS: Mapping[str, type[MostRewardStd] | type[BalancedLength]] = MappingProxyType(
    {"length_balance": BalancedLength, "reward_std": MostRewardStd}
)


def build_batch_filter(name: str, parameters: Mapping[str, Any], *, reward_key: str | None) -> BatchFilter:
    """Make a built-in over-sampling filter.

    Raises:
        ConfigError: If there is none of that name, or it is given a parameter.
    """
    if name not in BATCH_FILTERS:
        raise ConfigError(f"filter {name!r}: unknown filter; {suggestion(name, list(BATCH_FILTERS))}")
    if parameters:
        raise ConfigError(f"filter {name}: {next(iter(parameters))}: unknown parameter; it has none")
    return BATCH_FILTERS[name](reward_key=reward_key)


def _ascending(values: NDArray[np.float64]) -> list[int]:
    return [int(index) for index in np.argsort(values, kind="stable")]
