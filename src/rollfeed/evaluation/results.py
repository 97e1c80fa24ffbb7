"""What an evaluation found, set by set.

Invariant: an answer that could not be scored is in no number but the count of failures.

Axes: P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rollfeed.evaluation.keys import SetPlan
from rollfeed.evaluation.sets import EvalSet
from rollfeed.evaluation.statistics import Interval, cluster_interval, pass_at_k, pass_hat_k, powers_of_two
from rollfeed.types import Correct, Group, Rollout, SampleStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The numbers of one set, and the groups that they are of."""

    name: str
    num_prompts: int
    """Prompts whose answers are all scored; all other numbers are of these."""
    n_samples_per_prompt: int
    num_failed: int
    """Prompts with an answer that could not be made or scored."""
    first_failure: str | None
    num_over_length: int
    """Prompts left out because they are too long."""
    num_repeats: int = 0
    """Prompts left out because an earlier one asks the same."""
    num_missing: int = 0
    """Prompts that were asked for and are not there."""
    reward_mean: float | None
    """As all means, None where no prompt is scored."""
    accuracy: float | None
    """Share of right answers."""
    accuracy_interval: Interval
    """Of the accuracy, at 95 %, over prompts like these, answered so often."""
    pass_at_k: Mapping[int, float]
    """By k: the chance that one of k answers is right."""
    pass_hat_k: Mapping[int, float]
    """By k: the chance that all of k answers are right."""
    pass_at_k_interval: Mapping[int, Interval]
    """Of each ``pass_at_k``, at 95 %; ``pass_hat_k_interval`` of each ``pass_hat_k``."""
    pass_hat_k_interval: Mapping[int, Interval]
    truncated_ratio: float | None
    """Share of answers that ended at their length limit."""
    format_ok_ratio: float | None
    """Share of answers in which the grader found something to grade."""
    response_length_mean: float | None
    """In tokens."""
    response_length_median: float | None
    response_length_max: int | None
    groups: tuple[Group, ...]
    """By index, those with failures included."""
    right_P: tuple[int | None, ...]
    """Right answers to each prompt; None where one could not be scored. ``(P,)``, in the order of ``groups``."""
    reward_key: str | None
    correct_threshold: float

    def summary(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return {
            "num_prompts": self.num_prompts,
            "n_samples_per_prompt": self.n_samples_per_prompt,
            "num_failed": self.num_failed,
            "first_failure": self.first_failure,
            "num_over_length": self.num_over_length,
            "num_repeats": self.num_repeats,
            "num_missing": self.num_missing,
            "reward_mean": self.reward_mean,
            "accuracy": self.accuracy,
            "accuracy_low": self.accuracy_interval.low,
            "accuracy_high": self.accuracy_interval.high,
            "pass_at_k": {str(k): value for k, value in self.pass_at_k.items()},
            "pass_hat_k": {str(k): value for k, value in self.pass_hat_k.items()},
            "pass_at_k_interval": {str(k): list(each) for k, each in self.pass_at_k_interval.items()},
            "pass_hat_k_interval": {str(k): list(each) for k, each in self.pass_hat_k_interval.items()},
            "truncated_ratio": self.truncated_ratio,
            "format_ok_ratio": self.format_ok_ratio,
            "response_length_mean": self.response_length_mean,
            "response_length_median": self.response_length_median,
            "response_length_max": self.response_length_max,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """All sets, in the order of the settings."""

    sets: tuple[SetResult, ...]
    seed: int
    policy_versions: tuple[int, int]
    """The oldest and the newest that sampled an answer; equal unless weights changed meanwhile."""
    seconds: float
    num_tokens: int
    """Response tokens."""

    @property
    def accuracy(self) -> float | None:
        """The mean of the sets' accuracies, each counted once; None where no set has one."""
        return _mean([each.accuracy for each in self.sets if each.accuracy is not None])

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, as a tracker takes them: ``eval/<set>/<number>``."""
        found: dict[str, float] = {}
        for each in self.sets:
            numbers = {name: value for name, value in each.summary().items() if isinstance(value, int | float)}
            numbers |= {f"pass@{k}": value for k, value in each.pass_at_k.items()}
            numbers |= {f"pass^{k}": value for k, value in each.pass_hat_k.items()}
            found |= {f"eval/{each.name}/{name}": float(value) for name, value in numbers.items()}
        return found

    def summary(self) -> dict[str, Any]:
        """Return everything but the answers as JSON values."""
        return {
            "accuracy": self.accuracy,
            "seed": self.seed,
            "policy_versions": list(self.policy_versions),
            "num_tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
            "sets": {each.name: each.summary() for each in self.sets},
        }


def is_right(rollout: Rollout, *, reward_key: str | None, threshold: float) -> bool:
    """Whether a scored answer is right: as the grader says, else by its reward."""
    if rollout.verdict is not None and rollout.verdict.correct is not Correct.UNDEFINED:
        return rollout.verdict.correct is Correct.YES
    return rollout.get_reward_value(reward_key) >= threshold


def summarise(eval_set: EvalSet, answered: Sequence[Group]) -> SetResult:
    """Return the numbers of a set whose groups are all complete."""
    plan, n = eval_set.plan, eval_set.plan.n_samples_per_prompt
    groups = [group for group in answered if group.is_finished]
    failures = [group.error for group in answered if not group.is_finished]
    answers = [rollout for group in groups for rollout in group.rollouts]
    right_P = tuple(_num_right(group, plan) for group in answered)
    scored_P = [right for right in right_P if right is not None]
    shares_P = [right / n for right in scored_P]
    ks = powers_of_two(n) if groups else ()
    at_k = {k: [pass_at_k(n, right, k) for right in scored_P] for k in ks}
    hat_k = {k: [pass_hat_k(n, right, k) for right in scored_P] for k in ks}
    lengths = [rollout.response_tokens for rollout in answers]
    return SetResult(
        name=eval_set.name,
        num_prompts=len(groups),
        n_samples_per_prompt=n,
        num_failed=len(failures),
        first_failure=failures[0] if failures else None,
        num_over_length=eval_set.num_over_length,
        num_repeats=eval_set.num_repeats,
        num_missing=eval_set.num_missing,
        reward_mean=_mean([float(each) for group in groups for each in group.reward_values(plan.reward_key)]),
        accuracy=_mean(shares_P),
        accuracy_interval=cluster_interval(shares_P, num_trials=n),
        pass_at_k={k: fmean(each) for k, each in at_k.items()},
        pass_hat_k={k: fmean(each) for k, each in hat_k.items()},
        pass_at_k_interval={k: cluster_interval(each, num_trials=n / k) for k, each in at_k.items()},
        pass_hat_k_interval={k: cluster_interval(each, num_trials=n / k) for k, each in hat_k.items()},
        truncated_ratio=_mean([float(rollout.status is SampleStatus.TRUNCATED) for rollout in answers]),
        format_ok_ratio=_mean([float(rollout.verdict is None or rollout.verdict.format_ok) for rollout in answers]),
        response_length_mean=_mean(lengths),
        response_length_median=median(lengths) if lengths else None,
        response_length_max=max(lengths, default=None),
        groups=tuple(answered),
        right_P=right_P,
        reward_key=plan.reward_key,
        correct_threshold=plan.correct_threshold,
    )


def _num_right(group: Group, plan: SetPlan) -> int | None:
    if not group.is_finished:
        return None
    return sum(
        is_right(rollout, reward_key=plan.reward_key, threshold=plan.correct_threshold) for rollout in group.rollouts
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
