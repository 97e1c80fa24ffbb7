"""The loss of a micro-batch, put together from its settings.

The parts, and the papers that they are from, are in :mod:`rollfeed.training.losses`. The divergence is added to each
token's loss and weighted as that is, where GRPO has it (arXiv:2402.03300, section 4.1.1, equation 3); what corrects for
the engine multiplies the clipped loss and not the divergence.

Axes: T trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollfeed.config.train import Correction, LossSettings, Objective, OldLogprobs
from rollfeed.training.losses import (
    clipped_policy_loss,
    clipped_tokens,
    importance_ratio,
    importance_weights,
    kl_penalty,
    policy_ratio,
    weighted_policy_loss,
)
from rollfeed.training.metrics import Tally, add_mismatch
from rollfeed.training.model import Scored, to_device
from rollfeed.training.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenArrays:
    """The arrays of a micro-batch on the device of its log-probabilities."""

    mask_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    rollout_logprobs_T: Tensor
    sequence_ids_T: Tensor

    @classmethod
    def of(cls, micro_batch: MicroBatch, device: torch.device) -> TokenArrays:
        """Return them as tensors; sequences are numbered from 0."""
        names = ("mask_T", "advantages_T", "weights_T", "rollout_logprobs_T")
        _, number_T = np.unique(micro_batch.sequence_ids_T, return_inverse=True)
        return cls(
            **{name: to_device(getattr(micro_batch, name), device) for name in names},
            sequence_ids_T=to_device(number_T, device),
        )


def micro_batch_loss(
    scored: Scored,
    arrays: TokenArrays,
    *,
    settings: LossSettings,
    start_logprobs_T: Tensor | None,
    reference_logprobs_T: Tensor | None,
    tally: Tally,
) -> Tensor:
    """Return this micro-batch's part of its mini-batch's loss, a scalar with gradient.

    Args:
        scored: What the policy says now.
        arrays: Of the same tokens.
        settings: Which loss.
        start_logprobs_T: The trainer's before the batch's first update; None takes those of ``scored``.
        reference_logprobs_T: Needed where ``settings.kl_coefficient`` is above 0.
        tally: Takes what there is to tell.

    Nothing here waits for the device, and nothing around it in a micro-batch but a check of transformers' own in passes
    without branches: what the host wants to know it reads once an update.
    """
    logprobs_T, mask_T = scored.logprobs_T, arrays.mask_T
    trainer_T = logprobs_T.detach() if start_logprobs_T is None else start_logprobs_T
    old_T = trainer_T if settings.old_logprobs is OldLogprobs.TRAINER else arrays.rollout_logprobs_T
    ratio_T = policy_ratio(logprobs_T, old_T, mask_T=mask_T, sequence_ids_T=arrays.sequence_ids_T, level=settings.ratio)
    loss_T = _policy_loss(logprobs_T, ratio_T, arrays, settings)
    tally.count(mask_T)
    tally.add("entropy", scored.entropy_T, mask_T)
    add_mismatch(tally, trainer_logprobs_T=trainer_T, rollout_logprobs_T=arrays.rollout_logprobs_T, mask_T=mask_T)
    _add_clipping(tally, ratio_T.detach(), arrays, settings)
    if settings.correction is not Correction.NONE:
        loss_T = loss_T * _correction(trainer_T, arrays, settings, tally)
    if reference_logprobs_T is not None:
        kl_T = kl_penalty(
            logprobs_T, reference_logprobs_T=reference_logprobs_T, mask_T=mask_T, estimator=settings.kl_estimator
        )
        tally.add("reference_kl", kl_T, mask_T)
        loss_T = loss_T + settings.kl_coefficient * kl_T
    return (loss_T * arrays.weights_T).sum()


def _policy_loss(logprobs_T: Tensor, ratio_T: Tensor, arrays: TokenArrays, settings: LossSettings) -> Tensor:
    if settings.objective is Objective.CISPO:
        return weighted_policy_loss(
            logprobs_T,
            ratio_T=ratio_T,
            advantages_T=arrays.advantages_T,
            mask_T=arrays.mask_T,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
    return clipped_policy_loss(
        ratio_T,
        advantages_T=arrays.advantages_T,
        mask_T=arrays.mask_T,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )


def _add_clipping(tally: Tally, ratio_T: Tensor, arrays: TokenArrays, settings: LossSettings) -> None:
    advantages_T, mask_T = arrays.advantages_T, arrays.mask_T
    low_T, high_T = clipped_tokens(
        ratio_T,
        # Weights are cut to their range whatever the advantage is.
        advantages_T=advantages_T if settings.objective is Objective.CLIP else None,
        mask_T=mask_T,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
    )
    tally.add("clipped_low_ratio", low_T, mask_T)
    tally.add("clipped_high_ratio", high_T, mask_T)
    if settings.dual_clip > 0:
        tally.add("dual_clipped_ratio", (ratio_T > settings.dual_clip) & (advantages_T < 0), mask_T)
    tally.add_extremes("policy_ratio", ratio_T, mask_T)


def _correction(trainer_T: Tensor, arrays: TokenArrays, settings: LossSettings, tally: Tally) -> Tensor:
    mask_T = arrays.mask_T
    ratio_T = importance_ratio(
        trainer_T,
        rollout_logprobs_T=arrays.rollout_logprobs_T,
        mask_T=mask_T,
        sequence_ids_T=arrays.sequence_ids_T,
        level=settings.correction_level,
    )
    weights_T = importance_weights(
        ratio_T,
        mask_T=mask_T,
        correction=settings.correction,
        low=settings.correction_low,
        high=settings.correction_high,
    )
    tally.add("correction_weight", weights_T, mask_T)
    tally.add("corrected_ratio", weights_T != ratio_T, mask_T)
    return weights_T
