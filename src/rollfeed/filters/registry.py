"""The built-in filters by name, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from rollfeed.errors import ConfigError, suggestion
from rollfeed.filters.group_rule import GroupRule
from rollfeed.filters.responses import (
    AnySuccess,
    CompleteGroup,
    QualityAndDiversity,
    ResponseDiversity,
    ResponseLength,
    TruncatedFraction,
)
from rollfeed.filters.rewards import AllCorrect, AllWrong, AtLeastHalfCorrect, MinimumReward, RewardStd
from rollfeed.protocols import GroupFilter

FILTERS: Mapping[str, type[GroupRule]] = MappingProxyType(
    {
        "all_correct": AllCorrect,
        "all_wrong": AllWrong,
        "any_success": AnySuccess,
        "at_least_half_correct": AtLeastHalfCorrect,
        "complete_group": CompleteGroup,
        "minimum_reward": MinimumReward,
        "quality_and_diversity": QualityAndDiversity,
        "response_diversity": ResponseDiversity,
        "response_length": ResponseLength,
        "reward_std": RewardStd,
        "truncated_fraction": TruncatedFraction,
    }
)

_KIND_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}


def filter_names() -> tuple[str, ...]:
    """Return the names of the built-in filters, sorted."""
    return tuple(sorted(FILTERS))


def filter_parameters(name: str) -> dict[str, Any]:
    """Return a filter's own parameters with their defaults; ``...`` where one must be given.

    Raises:
        ConfigError: If there is no such filter.
    """
    own = {field.name for field in fields(_lookup(name))} - {field.name for field in fields(GroupRule)}
    return {
        field.name: ... if field.default is MISSING else field.default
        for field in fields(_lookup(name))
        if field.name in own
    }


def build_filter(
    name: str, parameters: Mapping[str, Any], *, n_samples_per_prompt: int, reward_key: str | None
) -> GroupFilter:
    """Make a built-in filter.

    Raises:
        ConfigError: If the name or a parameter is unknown, or a parameter is missing, of the wrong type
            or out of range; the message names the filter, the key and what to write.
    """
    rule = _lookup(name)
    known = filter_parameters(name)
    for key, value in parameters.items():
        if key not in known:
            raise ConfigError(f"filter {name}: {key}: unknown parameter; {suggestion(key, list(known))}")
        _check_type(name, key, value, get_type_hints(rule)[key])
    missing = [key for key, default in known.items() if default is ... and key not in parameters]
    if missing:
        raise ConfigError(f"filter {name}: {missing[0]} is missing: it has no default, set it")
    try:
        return rule(n_samples_per_prompt=n_samples_per_prompt, reward_key=reward_key, **parameters)
    except ConfigError as error:
        raise ConfigError(f"filter {name}: {error}") from error


def _lookup(name: str) -> type[GroupRule]:
    if name not in FILTERS:
        raise ConfigError(f"filter {name!r}: unknown filter; {suggestion(name, list(FILTERS))}")
    return FILTERS[name]


def _check_type(name: str, key: str, value: object, hint: Any) -> None:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    expected = kinds[0]
    accepted = (int, float) if expected is float else (expected,)
    fits = isinstance(value, accepted) and (expected is bool or not isinstance(value, bool))
    if not fits and not (value is None and NoneType in get_args(hint)):
        raise ConfigError(f"filter {name}: {key} = {value!r}: must be {_KIND_NAMES[expected]}")
