"""The divergence from the reference as a part of the reward.

It is that of the policy before the batch's first update, token by token, whatever ``old_logprobs`` says: engine and
trainer round differently, and a policy that is its reference has none. What becomes of it is the advantages'.

Axes: N samples of a batch, R response tokens of a sample, T trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.train import LossSettings
from rollfeed.errors import RunFailedError
from rollfeed.training.losses import kl_penalty
from rollfeed.training.objective import TrainedPart
from rollfeed.training.packing import MicroBatch
from rollfeed.training.ranks import Ranks
from rollfeed.training.scoring import to_device
from rollfeed.types import Advantages, TrainBatch

LessKL: TypeAlias = Callable[[TrainBatch, Sequence[NDArray[np.float64]]], Advantages]
"""Returns the advantages of a batch, given for each sample how much of its reward each response token takes, ``(R,)``;
0 where a token is not trained on."""
Minibatches: TypeAlias = list[list[TrainedPart]]


class RewardKL:
    """Takes the divergence from the reference off the rewards of a batch, whose advantages are made anew.

    ``ranks`` are those that train together; ``advantages`` is what makes them.
    """

    def __init__(self, settings: LossSettings, advantages: LessKL | None, ranks: Ranks) -> None:
        assert advantages is not None
        self._settings = settings
        self._advantages = advantages
        self._ranks = ranks

    def applied(self, batch: TrainBatch, minibatches: Minibatches) -> tuple[Minibatches, dict[str, float]]:
        """Return the mini-batches with new advantages, and metrics.

        Raises:
            RunFailedError: If the divergence of a token is not a number.
        """
        samples, coefficient = batch.samples, self._settings.reward_kl_coefficient
        own = {number: each for parts in minibatches for part in parts for number, each in self._divergences(part)}
        found = {number: each for theirs in self._ranks.everybodys(own) for number, each in theirs.items()}
        for number, kl_T in found.items():
            if not np.isfinite(kl_T).all():
                raise RunFailedError(
                    f"step {batch.step}: the divergence of sample {samples[number].index} from the reference is not a "
                    "number, so that it has no reward (train.loss.reward_kl_coefficient); nothing was changed"
                )
        taken_N = [np.zeros(sample.response_length) for sample in samples]
        for number, kl_T in found.items():
            taken_N[number][samples[number].loss_mask != 0] = coefficient * kl_T
        advantages_N = self._advantages(batch, taken_N)
        trained = np.concatenate([np.zeros(0), *found.values()])
        metrics = {
            #: train/reward_kl: divergence that rewards lose by, a token (`train.loss.reward_kl_coefficient` above 0)
            "reward_kl": float(trained.mean()) if len(trained) else 0.0,
            #: train/reward_kl_penalty: what it takes from the reward of a rollout, mean over the batch
            "reward_kl_penalty": float(sum(each.sum() for each in taken_N))
            / max(1, sum(len(group.rollouts) for group in batch.groups)),
        }
        changed = [[self._with_advantages(part, batch, advantages_N) for part in parts] for parts in minibatches]
        return changed, metrics

    def _divergences(self, part: TrainedPart) -> list[tuple[int, NDArray[np.float64]]]:
        """Return the divergence of each trained token by the sample's place in the batch."""
        arrays = part.arrays
        if arrays.is_idle:
            return []
        assert part.start_T is not None
        assert part.reference_T is not None
        kl_T = kl_penalty(
            part.start_T,
            reference_logprobs_T=part.reference_T,
            mask_T=arrays.mask_T,
            estimator=self._settings.reward_kl_estimator,
        )
        read_T = kl_T.double().cpu().numpy()
        return [(number, read_T[places]) for number, places in _by_sample(part.micro_batch)]

    def _with_advantages(self, part: TrainedPart, batch: TrainBatch, advantages_N: Advantages) -> TrainedPart:
        if part.arrays.is_idle:
            return part
        samples, micro_batch = batch.samples, part.micro_batch
        advantages_T = np.empty(len(micro_batch.mask_T), np.float32)
        for number, places in _by_sample(micro_batch):
            sample = samples[number]
            row_R = np.broadcast_to(np.asarray(advantages_N[number], np.float32), sample.response_length)
            advantages_T[places] = row_R[sample.loss_mask != 0]
        arrays = replace(part.arrays, advantages_T=to_device(advantages_T, part.arrays.mask_T.device))
        return replace(part, arrays=arrays)


def _by_sample(micro_batch: MicroBatch) -> list[tuple[int, NDArray[np.int64]]]:
    """Return where the trained tokens of each sample are, in their order, by its place in the batch."""
    ids_T = micro_batch.sequence_ids_T
    return [(int(number), np.flatnonzero(ids_T == number)) for number in np.unique(ids_T)]
