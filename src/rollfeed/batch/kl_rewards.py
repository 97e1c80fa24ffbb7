"""Advantages of rewards of which the divergence from a reference has been taken.

In what a policy maximises, the divergence is a part of the reward: ``r(x, y) - coefficient * log(policy / reference)``
(Ziegler et al., arXiv:1909.08593, equation 2; PPO of InstructGPT, arXiv:2203.02155, section 3.4). By estimator:

- ``group_mean``, ``leave_one_out`` and ``reinforce_pp_baseline`` compare whole rollouts: the reward of one is less by
  the sum over all its trained tokens, and that takes its part in the group's mean and deviation, in the other rollouts'
  baselines and in the whitening (RLOO, arXiv:2402.14740, section 2; verl's ``algorithm.use_kl_in_reward``).
- ``reinforce_pp`` gives tokens returns: that of a token is the reward less the sum from it on, and whitened over all
  trained tokens of the batch (REINFORCE++, arXiv:2501.03262, the token-level penalty; slime and verl with a discount
  of 1). What a rollout does in other samples than the token's counts to neither.

Samples that are not trained on lose nothing: nobody has asked what the reference says of them.

Axes: N samples of a batch, R response tokens of a sample, T trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.batch.advantages import as_float32, batch_advantages, whitening, with_added
from rollfeed.config.advantage import AdvantageEstimator, AdvantageSettings
from rollfeed.types import Advantages, TrainBatch


def advantages_less_kl(
    batch: TrainBatch,
    taken_N: Sequence[NDArray[np.float64]],
    *,
    settings: AdvantageSettings,
    reward_key: str | None = None,
) -> Advantages:
    """Return the advantages of all samples, given for each what its response tokens take of its reward, ``(R,)``.

    Raises:
        RunFailedError: If one is too large.
    """
    added_N = np.zeros(len(taken_N)) if batch.penalties_S is None else batch.penalties_S.astype(np.float64)
    if settings.estimator is AdvantageEstimator.REINFORCE_PP:
        rewards_N = np.array([each.get_reward_value(reward_key) for each in batch.samples]) + added_N
        return _of_returns(batch, rewards_N, taken_N)
    place = 0
    for group in batch.groups:
        for rollout in group.rollouts:
            own = slice(place, place := place + len(rollout.samples))
            added_N[own] -= sum(float(taken.sum()) for taken in taken_N[own])
    groups = with_added(batch.groups, added_N, reward_key=reward_key)
    return batch_advantages(groups, settings=settings, reward_key=reward_key)


def _of_returns(
    batch: TrainBatch, rewards_N: NDArray[np.float64], taken_N: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float32], ...]:
    """Return each token's return, how far it is above the mean of all trained ones, in deviations; ``(R,)`` each."""
    returns_N = [reward - np.cumsum(taken[::-1])[::-1] for reward, taken in zip(rewards_N, taken_N, strict=True)]
    masks_N = [np.zeros_like(each.loss_mask) if each.remove_sample else each.loss_mask for each in batch.samples]
    weights_T, returns_T = (np.concatenate([np.zeros(0), *each]) for each in (masks_N, returns_N))
    is_trained = weights_T > 0
    mean, scale = whitening(returns_T[is_trained], weights_T[is_trained], num_tokens=int(is_trained.sum()))
    whitened_T = as_float32([(returns_T - mean) * scale])
    return tuple(np.split(whitened_T, np.cumsum([len(each) for each in returns_N])[:-1]))
