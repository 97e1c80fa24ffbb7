"""The built-in filters by name, their parameters, and several filters as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from rollfeed.errors import ConfigError, suggestion
from rollfeed.faults import blaming, complaint, is_own
from rollfeed.filters import rules
from rollfeed.filters.rules import GroupRule
from rollfeed.protocols import GroupFilter
from rollfeed.types import Drop, FilterDecision, Keep, Sample

FILTERS: Mapping[str, type[GroupRule]] = MappingProxyType(
    {
        "all_correct": rules.AllCorrect,
        "all_wrong": rules.AllWrong,
        "any_success": rules.AnySuccess,
        "at_least_half_correct": rules.AtLeastHalfCorrect,
        "complete_group": rules.CompleteGroup,
        "minimum_reward": rules.MinimumReward,
        "quality_and_diversity": rules.QualityAndDiversity,
        "response_diversity": rules.ResponseDiversity,
        "response_length": rules.ResponseLength,
        "reward_std": rules.RewardStd,
        "truncated_fraction": rules.TruncatedFraction,
    }
)

_KIND_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}


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


@dataclass(frozen=True)
class ComposedFilter:
    """Ask filters in order; keep what all of them keep."""

    filters: tuple[GroupFilter, ...]

    def __call__(self, samples: Sequence[Sample]) -> FilterDecision:
        """Return the first final Drop; else the first Drop that is still usable; else Keep.

        Raises:
            RunFailedError: If a filter raises, or returns anything but Keep or Drop.
        """
        usable: Drop | None = None
        for group_filter in self.filters:
            setting = "filters.dynamic_sampling" if is_own(group_filter) else "plugins.group_filters"
            with blaming(setting, group_filter):
                decision: object = group_filter(samples)
            if isinstance(decision, Drop) and not decision.usable:
                return decision
            if isinstance(decision, Drop):
                usable = decision if usable is None else usable
            elif not isinstance(decision, Keep):
                raise complaint(setting, group_filter, f"returned {decision!r:.80}; return Keep() or Drop(reason)")
        return Keep() if usable is None else usable


def compose(filters: Sequence[GroupFilter]) -> GroupFilter:
    """Return one filter that drops what any of ``filters`` drops; without filters it keeps everything."""
    return ComposedFilter(tuple(filters))
