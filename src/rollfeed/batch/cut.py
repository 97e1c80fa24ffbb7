"""Cutting a batch: groups that are new enough, in order, one advantage a sample, and the numbers that describe it.

Invariant: no token that is trained on is staler than allowed, against the version that the batch is stamped with,
whatever made the groups.

Axes: G rollouts of a group, S samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.faults import blaming, complaint
from rollfeed.protocols import AdvantageFn, AgeRule
from rollfeed.types import BatchCut, ByAge, Correct, Group, SampleStatus, TrainBatch

_SETTING = "plugins.advantage"
_LARGEST = np.finfo(np.float32).max
_TOLERANCE = 1e-6
"""Rewards closer together than this are equal."""


def cut_batch(
    groups: Sequence[Group],
    *,
    step: int,
    policy_version: int,
    age_rule: AgeRule,
    reward_key: str | None,
    advantage_fn: AdvantageFn,
) -> BatchCut | ByAge:
    """Return the batch of a step, groups ordered by index; or, if some are too old for it, which.

    Raises:
        RunFailedError: If the advantage function raises, returns another number of values than it was given, or
            one that is not finite.
    """
    by_age = age_rule(groups, policy_version=policy_version)
    if by_age.requeued or by_age.dropped:
        return by_age
    ordered = tuple(sorted(by_age.fresh, key=lambda group: group.group_index))
    advantages_S = np.concatenate([_advantages(group, reward_key, advantage_fn) for group in ordered])
    batch = TrainBatch(
        step=step,
        policy_version=policy_version,
        groups=ordered,
        advantages_S=advantages_S.astype(np.float32),
        metrics=batch_metrics(ordered, reward_key=reward_key, policy_version=policy_version),
    )
    return BatchCut(batch=batch, masked_tokens=by_age.masked_tokens)


def _advantages(group: Group, reward_key: str | None, advantage_fn: AdvantageFn) -> NDArray[np.float64]:
    """Return the advantages of a group's samples. ``(S,)``."""
    rewards_G = group.reward_values(reward_key)
    with blaming(_SETTING, advantage_fn):
        advantages_G = advantages_S = np.asarray(advantage_fn(rewards_G), np.float64)
    fits = advantages_G.shape == rewards_G.shape
    if fits and len(group.samples) > len(rewards_G):
        scale = _scale(rewards_G, advantages_G)
        advantages_S = group.advantages_of_samples(advantages_G, scale=scale, reward_key=reward_key)
    if not fits or not (np.abs(advantages_S) <= _LARGEST).all():
        told = f"returned {advantages_G.tolist()} for rewards {rewards_G.tolist()} of group {group.group_index}"
        raise complaint(_SETTING, advantage_fn, f"{told}; it must return one finite number a rollout")
    return advantages_S


def _scale(rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> float:
    """Return how much a reward counts in the advantages: the slope of the line through the group's rollouts.

    That is 1 for a baseline alone, and 1 / deviation where it is divided by. Equal rewards have no such line, and 1.
    """
    spread = np.ptp(rewards_G)
    if spread <= _TOLERANCE:
        return 1.0
    centred_G = (rewards_G - rewards_G.mean()) / spread
    return float(centred_G @ advantages_G / (centred_G @ centred_G) / spread)


def batch_metrics(groups: Sequence[Group], *, reward_key: str | None, policy_version: int) -> dict[str, float]:
    """Return what a batch looks like, as flat ``rollout/...`` numbers; empty responses are legal."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.concatenate([group.reward_values(reward_key) for group in groups])
    lengths = np.array([rollout.response_tokens for rollout in rollouts], np.float64)
    judged = [r.verdict.correct for r in rollouts if r.verdict and r.verdict.correct is not Correct.UNDEFINED]
    samples = [sample for group in groups for sample in group.samples]
    ages = [policy_version - v for sample in samples if (v := sample.oldest_trained_version) is not None]
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/group_reward_std": float(np.mean([group.reward_values(reward_key).std() for group in groups])),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_min": float(lengths.min()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_ratio": float(np.mean([r.status is SampleStatus.TRUNCATED for r in rollouts])),
        "rollout/empty_ratio": float((lengths == 0).mean()),
        "rollout/groups_untrained": float(sum(group.trained_tokens == 0 for group in groups)),
        "rollout/trained_tokens": float(sum(sample.loss_mask.sum() for sample in samples)),
        "rollout/staleness_max": float(max(ages, default=0)),
        "rollout/staleness_mean": float(np.mean(ages)) if ages else 0.0,
        "rollout/several_versions_ratio": float(np.mean([len(sample.version_spans) > 1 for sample in samples])),
        "rollout/resumed_ratio": float(np.mean(["start_rollout_id" in sample.metadata for sample in samples])),
    }
    if judged:
        metrics["rollout/correct_ratio"] = float(np.mean([value is Correct.YES for value in judged]))
    return metrics
