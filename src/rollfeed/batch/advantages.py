"""Advantages: what the samples of a batch are trained with, by the estimator of ``[advantage]`` or a user's function.

Every rollout has one reward, however many samples it forked into, so a fork neither moves a baseline nor counts twice.
What compares with a group compares rollouts of one prompt: a rollout without others of its prompt, and all of a group
whose rewards are equal, have advantage 0. Where samples of a rollout have rewards of their own, each is compared by its
own, with the baseline and the deviation of the rollouts.

Axes: G rollouts of a group, S samples of a group, N samples of a batch, R response tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.advantage import AdvantageEstimator, AdvantageSettings
from rollfeed.conversations.pairs import PAIR
from rollfeed.errors import RunFailedError
from rollfeed.faults import blaming, complaint
from rollfeed.protocols import AdvantageFn
from rollfeed.types import REWARD_TOLERANCE, Advantages, Group, Sample, are_equal

_SETTING = "plugins.advantage"
_LARGEST = np.finfo(np.float32).max


def batch_advantages(
    groups: Sequence[Group],
    *,
    settings: AdvantageSettings,
    function: AdvantageFn | None = None,
    reward_key: str | None = None,
) -> Advantages:
    """Return the advantages of all samples, in the order of ``TrainBatch.samples``: ``(N,)``, or ``(R,)`` for each.

    ``function`` takes the place of the estimator that ``settings`` name; ``reward_key`` says which reward of a
    dictionary counts.

    Raises:
        RewardError: If a rollout is not scored, or has no such reward.
        RunFailedError: If an advantage is too large, or the function raises, or returns what is neither one finite
            number a rollout or sample nor, for each sample, one a response token.
    """
    if function is not None:
        return _joined(groups, [_of_function(group, function, reward_key) for group in groups])
    if settings.estimator in (AdvantageEstimator.REINFORCE_PP, AdvantageEstimator.REINFORCE_PP_BASELINE):
        has_baseline = settings.estimator is AdvantageEstimator.REINFORCE_PP_BASELINE
        return _whitened(groups, has_baseline=has_baseline, reward_key=reward_key)
    per_group = []
    for group in groups:
        rewards_G = group.reward_values(reward_key)
        scale = 1.0
        if settings.estimator is AdvantageEstimator.LEAVE_ONE_OUT:
            advantages_G = leave_one_out_advantages(rewards_G)
        else:
            scale = _one_over_std(rewards_G) if settings.divide_by_std else 1.0
            advantages_G = group_mean_advantages(rewards_G) * scale
        per_group.append(group.advantages_of_samples(advantages_G, scale=scale, reward_key=reward_key))
    return as_float32(per_group)


def equal_advantages(rewards_G: NDArray[np.float64], *, group: Group) -> NDArray[np.float64]:
    """Return 1 for every rollout, ``(G,)``: of answers that are given, each is learned as much as any other.

    Of a pair the preferred one has 1, and the other one -1.
    """
    return 2.0 * rewards_G - 1.0 if PAIR in group.prompt.metadata else np.ones_like(rewards_G)


def group_mean_advantages(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return reward minus the group's mean, ``(G,)``.

    Sources: Dr. GRPO (arXiv:2503.20783, section 3.2); divided by the group's standard deviation, GRPO
    (arXiv:2402.03300, section 4.1.2, outcome supervision), which weights very easy and very hard prompts up.
    """
    return np.zeros_like(rewards_G) if are_equal(rewards_G) else rewards_G - rewards_G.mean()


def leave_one_out_advantages(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return reward minus the mean of the group's other rewards, ``(G,)``.

    The baseline does not depend on the rollout itself, so that the estimate has no bias.

    Source: REINFORCE Leave-One-Out, RLOO (Ahmadian et al., "Back to Basics", arXiv:2402.14740), the estimator of that
    name.
    """
    if are_equal(rewards_G):
        return np.zeros_like(rewards_G)
    return np.asarray(rewards_G - (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1), np.float64)


def _whitened(groups: Sequence[Group], *, has_baseline: bool, reward_key: str | None) -> NDArray[np.float32]:
    """Return how far each sample's reward is above the mean over trained tokens of the batch, in deviations. ``(N,)``.

    A token counts by its weight in the loss mask, and the deviation is estimated with n - 1. With a baseline it is of
    rewards minus the group's mean, groups of one do not count, and those of equal rewards keep 0.

    Source: REINFORCE++ (arXiv:2501.03262), "Global Advantage Normalization": the variants "REINFORCE++" and, with the
    baseline, "REINFORCE++ w/ Baseline".
    """
    values: list[NDArray[np.float64]] = []
    weights: list[float] = []
    num_tokens = 0
    for group in groups:
        rewards_G = group.reward_values(reward_key)
        above_G = group_mean_advantages(rewards_G) if has_baseline else rewards_G
        values.append(group.advantages_of_samples(above_G, scale=1.0, reward_key=reward_key))
        counts = not has_baseline or len(rewards_G) > 1
        num_tokens += group.trained_tokens if counts else 0
        for sample in group.samples:
            weights.append(float(sample.loss_mask.sum()) if counts and not sample.remove_sample else 0.0)
    mean, scale = whitening(np.concatenate([np.zeros(0), *values]), np.array(weights), num_tokens=num_tokens)
    if scale == 0.0:
        return np.zeros(sum(map(len, values)), np.float32)
    return as_float32(
        [
            np.zeros_like(values_S) if has_baseline and are_equal(values_S) else (values_S - mean) * scale
            for values_S in values
        ]
    )


def whitening(values_N: NDArray[np.float64], weights_N: NDArray[np.float64], *, num_tokens: int) -> tuple[float, float]:
    """Return the mean of values by their weights, and 1 / deviation, estimated with ``num_tokens`` - 1.

    Both are 0 where there are fewer than two tokens, and the latter where all values are equal.
    """
    if num_tokens < 2:
        return 0.0, 0.0
    mean = np.average(values_N, weights=weights_N)
    if are_equal(values_N[weights_N > 0]):
        return float(mean), 0.0
    spread = np.ptp(values_N)  # squares of what it divides do not overflow
    variance = np.average(((values_N - mean) / spread) ** 2, weights=weights_N) * num_tokens / (num_tokens - 1)
    return float(mean), float(1.0 / (spread * variance**0.5 + REWARD_TOLERANCE))


def with_added(groups: Sequence[Group], added_N: NDArray[np.float64], *, reward_key: str | None) -> tuple[Group, ...]:
    """Return groups with something added to the reward of each sample, given in their order."""
    left = iter(added_N.tolist())

    def changed(sample: Sample) -> Sample:
        value = sample.get_reward_value(reward_key) + next(left)
        if isinstance(sample.reward, dict):
            return replace(sample, reward={**sample.reward, str(reward_key): value})
        return replace(sample, reward=value)

    return tuple(
        replace(
            group,
            rollouts=tuple(replace(each, samples=tuple(map(changed, each.samples))) for each in group.rollouts),
        )
        for group in groups
    )


def _of_function(
    group: Group, function: AdvantageFn, reward_key: str | None
) -> NDArray[np.float64] | list[NDArray[np.float64]]:
    """Return what a user's function says of a group: ``(S,)``, or ``(R,)`` for each sample."""
    rewards_G, samples = group.reward_values(reward_key), group.samples
    rewards_G.setflags(write=False)
    with blaming(_SETTING, function):
        returned = list(function(rewards_G, group=group))
        has_tokens = bool(returned) and all(np.ndim(row) == 1 for row in returned)
        rows = [np.asarray(row, np.float64) for row in returned] if has_tokens else [np.asarray(returned, np.float64)]
    numbers = rows[0]
    if has_tokens:
        fits = [len(row) for row in rows] == [sample.response_length for sample in samples]
    elif fits := numbers.shape in (rewards_G.shape, (len(samples),)):
        if len(numbers) < len(samples):
            scale = _slope(rewards_G, numbers)
            numbers = group.advantages_of_samples(numbers, scale=scale, reward_key=reward_key)
        rows = [numbers]
    if not fits or not all((np.abs(row) <= _LARGEST).all() for row in rows):
        shown = [row.tolist() for row in rows] if has_tokens else numbers.tolist()
        raise complaint(
            _SETTING,
            function,
            f"returned {shown} for rewards {rewards_G.tolist()} of group {group.group_index}; it must return one "
            "finite number a rollout or sample, or for each sample one a response token",
        )
    return rows if has_tokens else numbers


def _joined(
    groups: Sequence[Group], per_group: Sequence[NDArray[np.float64] | list[NDArray[np.float64]]]
) -> Advantages:
    """Return the advantages of all groups: one a token for all samples where a group has them so."""
    numbers = [each for each in per_group if isinstance(each, np.ndarray)]
    if len(numbers) == len(per_group):
        return as_float32(numbers)
    rows = [row for each in per_group for row in each]
    samples = [sample for group in groups for sample in group.samples]
    return tuple(
        np.full(sample.response_length, row, np.float32) if np.ndim(row) == 0 else row.astype(np.float32)
        for sample, row in zip(samples, rows, strict=True)
    )


def _slope(rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> float:
    """Return how much a reward counts in the advantages: the slope of the line through the group's rollouts.

    That is 1 for a baseline alone, and 1 / deviation where it is divided by. Equal rewards have no such line, and 1.
    """
    if are_equal(rewards_G):
        return 1.0
    spread = np.ptp(rewards_G)
    centred_G = (rewards_G - rewards_G.mean()) / spread
    return float(centred_G @ advantages_G / (centred_G @ centred_G) / spread)


def _one_over_std(rewards_G: NDArray[np.float64]) -> float:
    """Return 1 / standard deviation, estimated with n - 1; 1 where all rewards are equal."""
    if are_equal(rewards_G):
        return 1.0
    spread = float(np.ptp(rewards_G))
    return 1.0 / (spread * float((rewards_G / spread).std(ddof=1)) + REWARD_TOLERANCE)


def as_float32(per_group: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
    """Return advantages behind one another; raises RunFailedError if one is too large."""
    advantages_N = np.concatenate([np.zeros(0), *per_group])
    if not (np.abs(advantages_N) <= _LARGEST).all():
        raise RunFailedError("an advantage is too large for float32: rewards are too far apart; scale them down")
    return advantages_N.astype(np.float32)
