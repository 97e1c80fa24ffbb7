"""Policy losses, token by token.

A loss here is a value for each token; what is optimised is their sum, weighted by ``token_weights`` of
:mod:`rollfeed.training.normalisation`. Those are of a whole mini-batch: the sum over micro-batches is then the loss of
the mini-batch, however it was cut. Named methods are combinations:

======================  ==========================================================  =================  =================
method                  loss                                                        normalisation      advantages
======================  ==========================================================  =================  =================
GRPO                    :func:`clipped_policy_loss`, :func:`kl_penalty` (k3)        ``SEQUENCE``       group mean, std
Dr. GRPO                :func:`clipped_policy_loss`                                 ``CONSTANT``       group mean
DAPO                    :func:`clipped_policy_loss` with ``clip_high > clip_low``   ``TOKEN``          group mean, std
GSPO                    :func:`sequence_clipped_policy_loss`                        ``SEQUENCE``       group mean, std
REINFORCE++             :func:`clipped_policy_loss`                                 ``TOKEN``          over the batch
======================  ==========================================================  =================  =================

Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, DAPO arXiv:2503.14476, GSPO arXiv:2507.18071, REINFORCE++
arXiv:2501.03262; the functions name sections and equations.

Where ``mask_T`` is 0 every result is 0 and brings no gradient, whatever the other arrays hold there.

Axes: T response tokens of any number of packed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollfeed.config.train import Correction, KLEstimator

_LARGEST_LOG_RATIO = 20.0
"""Keeps ratios finite in float32; what lies beyond has no gradient."""


def clipped_policy_loss(
    logprobs_T: Tensor,
    *,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` of each token, ``(T,)``.

    Sources: PPO (arXiv:1707.06347, section 3, equation 7) with the group's advantage for every token as in GRPO
    (arXiv:2402.03300, section 4.1.1, equation 3); the two bounds are Clip-Higher of DAPO (arXiv:2503.14476, section
    3.1); REINFORCE++ (arXiv:2501.03262) has the same loss with advantages over the batch.
    """
    ratio_T = _ratio(logprobs_T, old_logprobs_T, mask_T)
    return _clipped(ratio_T, advantages_T, clip_low, clip_high) * _indicator(mask_T)


def sequence_clipped_policy_loss(
    logprobs_T: Tensor,
    *,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return the clipped loss of each token's whole sequence, by its length-normalised ratio, ``(T,)``.

    All tokens of a sequence have the same value, so that normalising by sequence gives each sequence its loss once.
    A sequence must not be split over calls; ``sequence_ids_T`` are as for :func:`sequence_ratio`.

    Source: GSPO (arXiv:2507.18071, section 4.1, equations 5 to 7). With float masks the mean is a weighted one.
    """
    ratio_T = sequence_ratio(logprobs_T, old_logprobs_T, mask_T=mask_T, sequence_ids_T=sequence_ids_T)
    return _clipped(ratio_T, advantages_T, clip_low, clip_high) * _indicator(mask_T)


def sequence_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, *, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Return, for each token, the geometric mean of the ratios of its sequence; 1 for a sequence without tokens.

    Args:
        logprobs_T: Of the policy that changes.
        old_logprobs_T: Of the one that it is compared with.
        mask_T: The weight of each token.
        sequence_ids_T: Equal for the tokens of one sequence; from 0 to T - 1, so that none is looked for.

    Source: GSPO (arXiv:2507.18071, section 4.1, equation 7).
    """
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, mask_T) * mask_T
    empty_T = torch.zeros_like(log_ratio_T)
    sums_T = empty_T.index_add(0, sequence_ids_T, log_ratio_T)
    lengths_T = empty_T.index_add(0, sequence_ids_T, mask_T.to(empty_T.dtype))
    return torch.exp(sums_T / torch.where(lengths_T > 0, lengths_T, 1.0))[sequence_ids_T]


def kl_penalty(logprobs_T: Tensor, *, reference_logprobs_T: Tensor, mask_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Return an estimate of ``KL(policy || reference)`` from each token, ``(T,)``.

    Sources: k1, k2 and k3 are those of Schulman, "Approximating KL Divergence" (2020,
    http://joschu.net/blog/kl-approx.html); GRPO (arXiv:2402.03300, section 4.1.1, equation 4) adds k3 to the loss.
    """
    log_ratio_T = _log_ratio(reference_logprobs_T, logprobs_T, mask_T)
    if estimator is KLEstimator.K1:
        return -log_ratio_T
    if estimator is KLEstimator.K2:
        return 0.5 * log_ratio_T.square()
    return torch.expm1(log_ratio_T) - log_ratio_T


def importance_weights(
    trainer_logprobs_T: Tensor,
    *,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    correction: Correction,
    low: float,
    high: float,
) -> Tensor:
    """Return what corrects each token's loss for having been sampled by the engine, ``(T,)``; never has a gradient.

    ``TRUNCATE`` is the trainer's over the engine's probability, at most ``high``; ``MASK`` is the same, and 0 outside
    ``low`` to ``high``. Tokens that it takes out still count as trained ones in the normalisation, as in IcePop.

    Sources: truncated importance sampling, Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025), the section of that name; masking, IcePop in "Every Step Evolves" (arXiv:2510.18855) and Liu et
    al., "When Speed Kills Stability" (2025).
    """
    with torch.no_grad():
        ratio_T = _ratio(trainer_logprobs_T, rollout_logprobs_T, mask_T)
        if correction is Correction.NONE:
            return _indicator(mask_T).to(ratio_T.dtype)
        if correction is Correction.TRUNCATE:
            return ratio_T.clamp(max=high) * _indicator(mask_T)
        return ratio_T * ((ratio_T >= low) & (ratio_T <= high) & (mask_T != 0))


def clipped_tokens(
    ratio_T: Tensor, *, advantages_T: Tensor, mask_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return which tokens get no gradient from the lower and from the upper bound, two boolean ``(T,)``."""
    trained_T = mask_T != 0
    low_T = (ratio_T < 1.0 - clip_low) & (advantages_T < 0) & trained_T
    high_T = (ratio_T > 1.0 + clip_high) & (advantages_T > 0) & trained_T
    return low_T, high_T


def token_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, *, mask_T: Tensor) -> Tensor:
    """Return the ratio of new and old probability of each token, 1 where it is not trained on, ``(T,)``."""
    return _ratio(logprobs_T, old_logprobs_T, mask_T)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Tensor:
    bounded_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)


def _ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.exp(_log_ratio(logprobs_T, old_logprobs_T, mask_T))


def _log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    # Selected, not multiplied: what is not trained on may hold anything, and 0 times infinity is not a number.
    # NaN passes the clamp, so that a broken logprob of a trained token is seen.
    trained_T = mask_T != 0
    difference_T = torch.where(trained_T, logprobs_T, 0.0) - torch.where(trained_T, old_logprobs_T, 0.0)
    return difference_T.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def _indicator(mask_T: Tensor) -> Tensor:
    return (mask_T != 0).to(mask_T.dtype)
