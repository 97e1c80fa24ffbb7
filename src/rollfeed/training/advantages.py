"""Advantages of rollouts.

Every rollout has one reward and one advantage, however many samples it forked into, so a fork neither moves
a mean nor counts twice. What compares with a group compares rollouts of one prompt; a rollout without others of
its prompt has nothing to be compared with, and advantage 0. Where samples of a rollout have rewards of their own, each
is compared by its own, with the baseline and the deviation that the rollouts give.

Axes: G rollouts of a group, N rollouts of a batch, S samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.train import AdvantageEstimator
from rollfeed.types import Group

_TOLERANCE = 1e-6
"""Rewards closer together than this are equal: the deviation of equal float rewards is not exactly 0."""


def group_mean_advantages(rewards_G: NDArray[np.float64], *, divide_by_std: bool = False) -> NDArray[np.float64]:
    """Return reward minus the group's mean, divided by the group's standard deviation if asked, ``(G,)``.

    Sources: GRPO (arXiv:2402.03300, section 4.1.2, outcome supervision) divides; Dr. GRPO (arXiv:2503.20783,
    section 3.2) does not, because the division weights very easy and very hard prompts up.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if _all_equal(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return np.asarray(centred_G / (rewards_G.std() + _TOLERANCE) if divide_by_std else centred_G, np.float64)


def leave_one_out_advantages(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return reward minus the mean of the group's other rewards, ``(G,)``.

    The baseline does not depend on the rollout itself, so that the estimate has no bias.

    Source: REINFORCE Leave-One-Out, RLOO (Ahmadian et al., "Back to Basics", arXiv:2402.14740), the estimator of that
    name.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if _all_equal(rewards_G):
        return np.zeros_like(rewards_G)
    others = len(rewards_G) - 1
    return np.asarray(rewards_G - (rewards_G.sum() - rewards_G) / others, np.float64)


def reinforce_pp_advantages(
    rewards_of_groups: Sequence[NDArray[np.float64]], *, group_baseline: bool
) -> list[NDArray[np.float64]]:
    """Return advantages normalised by mean and standard deviation over the rollouts of the whole batch, a group each.

    Args:
        rewards_of_groups: One ``(G,)`` a group.
        group_baseline: Subtract the group's mean first. Without it a group of one is compared with the batch.

    Source: REINFORCE++ (arXiv:2501.03262), "Global Advantage Normalization": the variants "REINFORCE++" and, with
    ``group_baseline``, "REINFORCE++ w/ Baseline". Rollouts, not tokens, are normalised over, so that long responses
    do not decide the mean.
    """
    values, everything_N = _baselined(rewards_of_groups, group_baseline=group_baseline)
    if _all_equal(everything_N):
        return [np.zeros(len(values_G)) for values_G in values]
    mean, scale = everything_N.mean(), _scale(everything_N)
    return [
        np.asarray((values_G - mean) * scale, np.float64)
        if not group_baseline or len(values_G) > 1
        else np.zeros(len(values_G))
        for values_G in values
    ]


def _baselined(
    rewards_of_groups: Sequence[NDArray[np.float64]], *, group_baseline: bool
) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """Return what is normalised, a group each, and all that mean and deviation are of. ``(N,)``."""
    values = [group_mean_advantages(rewards_G) if group_baseline else rewards_G for rewards_G in rewards_of_groups]
    # A group of one has no baseline, and so no part in the deviation.
    counted = [values_G for values_G in values if not group_baseline or len(values_G) > 1]
    return values, np.concatenate([np.zeros(0), *counted])


def batch_advantages(
    groups: Sequence[Group],
    *,
    estimator: AdvantageEstimator,
    divide_by_std: bool = False,
    reward_key: str | None = None,
) -> NDArray[np.float32]:
    """Return one advantage a sample, in the order of ``TrainBatch.samples``, ``(S,)``.

    Args:
        groups: The rollouts of one prompt each.
        estimator: Which of the functions above.
        divide_by_std: For ``GROUP_MEAN`` only.
        reward_key: Which reward counts, where rewards are dictionaries.

    Raises:
        RewardError: If a rollout is not scored, or has no such reward.
    """
    rewards = [group.reward_values(reward_key) for group in groups]
    match estimator:
        case AdvantageEstimator.GROUP_MEAN:
            advantages = [group_mean_advantages(rewards_G, divide_by_std=divide_by_std) for rewards_G in rewards]
            scales = [_scale(rewards_G) if divide_by_std else 1.0 for rewards_G in rewards]
        case AdvantageEstimator.LEAVE_ONE_OUT:
            advantages = [leave_one_out_advantages(rewards_G) for rewards_G in rewards]
            scales = [1.0] * len(groups)
        case _:
            baseline = estimator is AdvantageEstimator.REINFORCE_PP_BASELINE
            advantages = reinforce_pp_advantages(rewards, group_baseline=baseline)
            scales = [_scale(_baselined(rewards, group_baseline=baseline)[1])] * len(groups)
    of_samples = [
        group.advantages_of_samples(advantages_G, scale=scale, reward_key=reward_key)
        for group, advantages_G, scale in zip(groups, advantages, scales, strict=True)
    ]
    return np.concatenate([np.zeros(0), *of_samples]).astype(np.float32)


def _scale(values: NDArray[np.float64]) -> float:
    """Return 1 / deviation, by which advantages are divided; 1 where all values are equal."""
    return 1.0 if _all_equal(values) else 1.0 / (float(values.std()) + _TOLERANCE)


def _all_equal(values: NDArray[np.float64]) -> bool:
    return len(values) < 2 or float(np.ptp(values)) <= _TOLERANCE
