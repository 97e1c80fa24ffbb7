"""The forms in which slime's rollout functions, generate functions and filters return, and its two built-in filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollfeed.compat.slime_plugins.shared_run import latest
from rollfeed.types import are_equal


@dataclass
class RolloutFnTrainOutput:
    """The groups of a step."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Answers by data set."""

    data: dict[str, Any]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function, and put what older ones return into the form of newer ones."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


@dataclass(frozen=True)
class GenerateFnInput:
    """The argument of generate functions of miles."""

    state: Any
    sample: Any
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Any:
        """The arguments of the run."""
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """The result of generate functions of miles: a sample, or a list."""

    samples: Any


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept, and why not."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter, or none, and put a bool into the form of newer ones, that of a ``slime_drop:`` filter turned."""
    output = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    if not isinstance(output, bool | np.bool_):
        return output
    return DynamicFilterOutput(keep=bool(output) is not (fn in latest().drop_filters))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether a group goes: one that is usable stays while no more than a batch is in flight and kept."""
    is_needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not (output.keep or is_needed)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one, where it has a reason."""
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return the counts under slime's names."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._reasons.items()}


def _rewards(args: Any, group: Sequence[Any]) -> list[float]:
    leaves = [each[-1] if isinstance(each, list) else each for each in group]
    return [float(sample.get_reward_value(args)) for sample in leaves]


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    del kwargs
    rewards = _rewards(args, samples)
    is_dropped = are_equal(np.array(rewards, np.float64))
    return DynamicFilterOutput(keep=not is_dropped, reason=f"zero_std_{rewards[0]:.1f}" if is_dropped else None)


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ, and any where the step would be short otherwise."""
    return replace(check_reward_nonzero_std(args, samples, **kwargs), keep_when_insufficient=True)


def sort_by_reward_std(args: Any, samples: Sequence[Any], **kwargs: Any) -> list[Any]:
    """Return the groups, those first whose rewards differ most."""
    del kwargs
    return sorted(samples, key=lambda group: -float(np.std(_rewards(args, group))))
