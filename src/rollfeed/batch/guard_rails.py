"""Numbers that tell whether a reward still means what it should.

Only answers to the same prompt are compared, so that neither hard nor long prompts count.

Axes: G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import REWARD_TOLERANCE, Correct, Group


def guard_rails(groups: Sequence[Group], *, reward_key: str | None) -> dict[str, float]:
    """Return what the rewards of a batch's groups have in common with lengths, each other and what is right."""
    centred: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    num_pairs = num_equal = 0
    agreements: list[float] = []
    parts: dict[str, list[float]] = {}
    for group in groups:
        rewards_G = group.reward_values(reward_key)
        lengths_G = np.array([rollout.response_tokens for rollout in group.rollouts], np.float64)
        centred.append((rewards_G - rewards_G.mean(), lengths_G - lengths_G.mean()))
        differences_GG = rewards_G[:, None] - rewards_G[None, :]
        above = np.triu_indices(len(rewards_G), k=1)
        num_pairs += len(above[0])
        num_equal += int((np.abs(differences_GG[above]) <= REWARD_TOLERANCE).sum())
        correct = [None if rollout.verdict is None else rollout.verdict.correct for rollout in group.rollouts]
        right, wrong = ([place for place, each in enumerate(correct) if each is kind] for kind in _JUDGED)
        found_RW = differences_GG[np.ix_(right, wrong)]
        agreements += np.where(np.abs(found_RW) <= REWARD_TOLERANCE, 0.5, found_RW > 0).ravel().tolist()
        for sample in group.samples:
            for name, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
                parts.setdefault(name, []).append(value)
    metrics: dict[str, float] = {}
    rewards, lengths = (np.concatenate(each) for each in zip(*centred, strict=True))
    spread = float(np.sqrt((rewards**2).sum() * (lengths**2).sum()))
    if spread > REWARD_TOLERANCE:
        #: reward/length_correlation: of reward and response length within groups, from -1 to 1
        metrics["reward/length_correlation"] = float((rewards * lengths).sum() / spread)
    if num_pairs:
        #: reward/equal_share: share of pairs of answers to one prompt that have equal rewards
        metrics["reward/equal_share"] = num_equal / num_pairs
    if agreements:
        #: reward/label_agreement: share of pairs of a right and a wrong answer to one prompt of which the right one has
        #: the higher reward; equal ones count half
        metrics["reward/label_agreement"] = float(np.mean(agreements))
    #: reward/parts/<part>_mean: mean of a named number of the rewards, such as a part of a mixture
    return metrics | {f"reward/parts/{name}_mean": float(np.mean(values)) for name, values in parts.items()}


_JUDGED = (Correct.YES, Correct.NO)
