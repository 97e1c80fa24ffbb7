"""Policy losses, token by token.

A loss here is a value for each token; what is optimised is their sum, weighted by
:func:`token_weights`. Those are of a whole mini-batch: the sum over micro-batches is then the loss of
the mini-batch, however it was cut. Named methods are combinations:

=============  ==============================  =======================  =================  ====================
method         loss                            ratio and its range      normalisation      advantages
=============  ==============================  =======================  =================  ====================
GRPO           :func:`clipped_policy_loss`     token, 0.8 to 1.2        ``SEQUENCE``       group mean, std
Dr. GRPO       :func:`clipped_policy_loss`     token, 0.8 to 1.2        ``CONSTANT``       group mean
DAPO           :func:`clipped_policy_loss`     token, 0.8 to 1.28       ``TOKEN``          group mean, std
GSPO           :func:`clipped_policy_loss`     sequence, 1 -3e-4 +4e-4  ``SEQUENCE``       group mean, std
REINFORCE++    :func:`clipped_policy_loss`     token, 0.8 to 1.2        ``TOKEN``          whitened over tokens
RLOO           :func:`clipped_policy_loss`     token, 0.8 to 1.2        ``CONSTANT`` of 1  leave one out
CISPO          :func:`weighted_policy_loss`    token, 0 to 5            ``TOKEN``          group mean, std
=============  ==============================  =======================  =================  ====================

:mod:`rollfeed.config.method` has the same as settings. Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, DAPO
arXiv:2503.14476, GSPO arXiv:2507.18071, REINFORCE++ arXiv:2501.03262, RLOO arXiv:2402.14740, CISPO arXiv:2506.13585;
the functions name sections and equations.

Where ``mask_T`` is 0 every result is 0 and brings no gradient, whatever the other arrays hold there.

Axes: T response tokens of any number of packed sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.config.train import Correction, KLEstimator, Normalisation, RatioLevel
from rollfeed.errors import RunFailedError
from rollfeed.faults import attributed, blaming, complaint
from rollfeed.protocols import LossFn, LossInputs
from rollfeed.training.packing import TrainSequence

_LARGEST_LOG_RATIO = 20.0
"""Keeps ratios finite in float32; what lies beyond has no gradient."""


def token_weights(
    mask_T: NDArray[np.float32],
    rollout_ids_T: NDArray[np.int64],
    *,
    normalisation: Normalisation,
    constant_length: int | None = None,
) -> NDArray[np.float32]:
    """Return what each token's loss is multiplied with before all are added up, ``(T,)``.

    Only trained tokens count: sequences that are masked out altogether change neither the sum nor what it is divided
    by. Forks of one rollout are one output: they share its weight.

    Args:
        mask_T: The weight of each token of the whole mini-batch; 0 is not trained on.
        rollout_ids_T: Equal for the tokens of one rollout.
        normalisation: ``TOKEN`` divides by all trained tokens (DAPO, arXiv:2503.14476, section 3.3); ``SEQUENCE`` by
            those of the rollout, and then by the rollouts (GRPO, arXiv:2402.03300, section 4.1.1, equation 3);
            ``CONSTANT`` by ``constant_length`` instead of the former (Dr. GRPO, arXiv:2503.20783, section 3.2).
        constant_length: Needed for ``CONSTANT``.

    Raises:
        ValueError: If it is needed and not given.
    """
    mask_64 = np.asarray(mask_T, np.float64)
    if not mask_64.any():
        return np.zeros(len(mask_64), np.float32)
    if normalisation is Normalisation.TOKEN:
        return np.asarray(mask_64 / mask_64.sum(), np.float32)
    _, number_T = np.unique(rollout_ids_T, return_inverse=True)
    sums = np.bincount(number_T, weights=mask_64)
    num_rollouts = np.count_nonzero(sums)
    if normalisation is Normalisation.SEQUENCE:
        return np.asarray(mask_64 / np.where(sums > 0, sums, 1.0)[number_T] / num_rollouts, np.float32)
    if constant_length is None:
        raise ValueError("normalisation by a constant needs constant_length")
    return np.asarray(mask_64 / (constant_length * num_rollouts), np.float32)


def sequence_weights(
    sequences: Sequence[TrainSequence], *, normalisation: Normalisation, constant_length: int | None
) -> list[NDArray[np.float32]]:
    """Return :func:`token_weights` of a mini-batch, ``(T,)`` for each sequence."""
    if not sequences:
        return []
    lengths = [len(sequence.mask_T) for sequence in sequences]
    weights = token_weights(
        np.concatenate([sequence.mask_T for sequence in sequences]),
        np.repeat([sequence.rollout_id for sequence in sequences], lengths),
        normalisation=normalisation,
        constant_length=constant_length,
    )
    return np.split(weights, np.cumsum(lengths)[:-1])


def policy_ratio(
    logprobs_T: Tensor, old_logprobs_T: Tensor, *, mask_T: Tensor, sequence_ids_T: Tensor, level: RatioLevel
) -> Tensor:
    """Return the ratio of new and old probability, of each token or of its sequence, ``(T,)``.

    That of a sequence is the geometric mean over its tokens, 1 for one without. It has, at each token, the gradient of
    that token's log-probability alone, so that what masks or weights a token takes its part of the gradient and no
    other's; where all tokens of a sequence weigh alike, their sum is the gradient of the mean.

    Args:
        logprobs_T: Of the policy that changes.
        old_logprobs_T: Of the one that it is compared with.
        mask_T: The weight of each token; with float ones the mean is a weighted one.
        sequence_ids_T: Equal for the tokens of one sequence, which is not split over calls; from 0 to T - 1, so that
            none is looked for.
        level: Of what.

    Source: PPO (arXiv:1707.06347); of a sequence, GSPO-token (arXiv:2507.18071, sections 4.1 and 4.3, equations 7 and
    14).
    """
    log_ratio_T = _log_ratio(logprobs_T, old_logprobs_T, mask_T)
    if level is RatioLevel.TOKEN:
        return torch.exp(log_ratio_T)
    sums_T = _sum_over_sequences(log_ratio_T.detach() * mask_T, sequence_ids_T)
    lengths_T = _sum_over_sequences(mask_T.to(log_ratio_T.dtype), sequence_ids_T)
    mean_T = sums_T / torch.where(lengths_T > 0, lengths_T, 1.0)
    return torch.exp((log_ratio_T - log_ratio_T.detach()) + mean_T)


def clipped_policy_loss(
    ratio_T: Tensor, *, advantages_T: Tensor, mask_T: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """Return ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` of each token, ``(T,)``.

    Where ``A < 0`` and ``dual_clip`` is above 0, at most ``-dual_clip * A``.

    Sources: PPO (arXiv:1707.06347, section 3, equation 7) with the group's advantage for every token as in GRPO
    (arXiv:2402.03300, section 4.1.1, equation 3); the two bounds are Clip-Higher of DAPO (arXiv:2503.14476, section
    3.1); dual clip, Ye et al. (arXiv:1912.09729, equation 4).
    """
    bounded_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses_T = -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    if dual_clip > 0.0:
        losses_T = torch.where(advantages_T < 0, torch.minimum(losses_T, -dual_clip * advantages_T), losses_T)
    return losses_T * _indicator(mask_T)


def weighted_policy_loss(
    logprobs_T: Tensor, *, ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return ``-clip(ratio, 1 - clip_low, 1 + clip_high) * A * log-probability`` of each token, ``(T,)``.

    The clipped ratio is a weight without gradient, so that every token has one.

    Source: CISPO in MiniMax-M1 (arXiv:2506.13585, section 3.1, equations 4 and 5).
    """
    weights_T = ratio_T.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights_T * advantages_T * torch.where(mask_T != 0, logprobs_T, 0.0)


def kl_penalty(logprobs_T: Tensor, *, reference_logprobs_T: Tensor, mask_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Return an estimate of ``KL(policy || reference)`` from each token, ``(T,)``.

    Sources: k1, k2 and k3 are those of Schulman, "Approximating KL Divergence" (2020,
    http://joschu.net/blog/kl-approx.html); GRPO (arXiv:2402.03300, section 4.1.1, equation 4) adds k3 to the loss. k3+
    has the gradient of k2, which on average is that of the divergence, as verl's estimator of that name.
    """
    log_ratio_T = _log_ratio(reference_logprobs_T, logprobs_T, mask_T)
    if estimator is KLEstimator.K1:
        return -log_ratio_T
    if estimator is KLEstimator.K2:
        return 0.5 * log_ratio_T.square()
    k3_T = torch.expm1(log_ratio_T) - log_ratio_T
    if estimator is KLEstimator.K3:
        return k3_T
    k2_T = 0.5 * log_ratio_T.square()
    return k3_T.detach() + k2_T - k2_T.detach()


def importance_ratio(
    trainer_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, level: RatioLevel
) -> Tensor:
    """Return the trainer's over the engine's probability, of each token or of its sequence, ``(T,)``; no gradient.

    That of a sequence is the product over its trained tokens, as verl and TRL have it.
    """
    with torch.no_grad():
        log_ratio_T = _log_ratio(trainer_logprobs_T, rollout_logprobs_T, mask_T)
        if level is RatioLevel.SEQUENCE:
            sums_T = _sum_over_sequences(log_ratio_T, sequence_ids_T)
            log_ratio_T = sums_T.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        return torch.exp(log_ratio_T)


def importance_weights(ratio_T: Tensor, *, mask_T: Tensor, correction: Correction, low: float, high: float) -> Tensor:
    """Return what corrects each token's loss for having been sampled by the engine, given the ratio for it, ``(T,)``.

    ``TRUNCATE`` is the ratio, at most ``high``; ``MASK`` is the same, and 0 outside ``low`` to ``high``. Tokens that it
    takes out still count as trained ones in the normalisation, as in IcePop.

    Sources: truncated importance sampling, Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025), the section of that name; masking, IcePop in "Every Step Evolves" (arXiv:2510.18855); both of
    sequences, Liu et al., "When Speed Kills Stability" (2025).
    """
    trained_T = _indicator(mask_T).to(ratio_T.dtype)
    if correction is Correction.NONE:
        return trained_T
    if correction is Correction.TRUNCATE:
        return ratio_T.clamp(max=high) * trained_T
    return ratio_T * ((ratio_T >= low) & (ratio_T <= high)) * trained_T


def clipped_tokens(
    ratio_T: Tensor, *, advantages_T: Tensor | None, mask_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return which tokens get no gradient from the lower and from the upper bound, two boolean ``(T,)``.

    Without advantages: those whose ratio is outside its range.
    """
    low_T, high_T = (ratio_T < 1.0 - clip_low) & (mask_T != 0), (ratio_T > 1.0 + clip_high) & (mask_T != 0)
    return (low_T, high_T) if advantages_T is None else (low_T & (advantages_T < 0), high_T & (advantages_T > 0))


class OwnLoss:
    """A user's function as the policy loss: calls it, and refuses what is none."""

    SETTING = "train.loss.function"

    def __init__(self, function: LossFn) -> None:
        self._function = function
        self._names: list[str] | None = None

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, of each token ``(T,)`` or as a whole ``()``, and metrics, ``(T,)`` each.

        Raises:
            RunFailedError: If the function raises, returns something else, or has changed what it was handed.
        """
        given = {name: each for name in LossInputs.__slots__ if isinstance(each := getattr(inputs, name), Tensor)}
        before = {name: each._version for name, each in given.items()}
        with blaming(self.SETTING, self._function):
            returned = self._function(inputs)
        if changed := next((name for name, each in given.items() if each._version != before[name]), None):
            raise self._complaint(f"changed {changed} in place: it must compute with a copy")
        loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        self._check(loss, metrics, inputs)
        return loss, metrics

    def named(self, text: str) -> str:
        """Return what is wrong with what the function computed, with its name and where it is."""
        return attributed(self.SETTING, self._function, text)

    def _check(self, loss: object, metrics: object, inputs: LossInputs) -> None:
        like_T, promised = inputs.logprobs_T, "it must return the loss of each token, (T,), or a number with a gradient"
        if not isinstance(loss, Tensor):
            raise self._complaint(f"returned {loss!r:.100} ({type(loss).__name__}), no tensor: {promised}")
        if loss.shape not in (like_T.shape, ()) or not loss.is_floating_point() or loss.device != like_T.device:
            raise self._complaint(
                f"returned a tensor of shape {tuple(loss.shape)} of {loss.dtype} on {loss.device}, where "
                f"T = {len(like_T)} on {like_T.device}: {promised}"
            )
        if not loss.requires_grad:
            raise self._complaint("returned a loss without a gradient: it must come of logprobs_T or entropy_T")
        if loss.ndim == 0 and inputs.settings.correction is not Correction.NONE:
            raise self._complaint(
                f"returned one number, and train.loss.correction = {inputs.settings.correction.value!r} weighs tokens: "
                "it must return the loss of each token, or set correction = 'none'"
            )
        if not isinstance(metrics, Mapping):
            raise self._complaint(f"returned metrics as {type(metrics).__name__}: it must return tensors (T,) by name")
        for name, values_T in metrics.items():
            if not isinstance(name, str) or not isinstance(values_T, Tensor) or values_T.shape != like_T.shape:
                raise self._complaint(f"returned the metric {name!r}, which is no tensor (T,): it must be one")
        names, self._names = self._names, sorted(metrics)
        if names is not None and names != self._names:
            raise self._complaint(
                f"returned the metrics {self._names}, and {names} before: it must return the same in every call"
            )

    def _complaint(self, text: str) -> RunFailedError:
        return complaint(self.SETTING, self._function, text)


def _sum_over_sequences(values_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Return, for each token, the sum of the values of its sequence."""
    return torch.zeros_like(values_T).index_add(0, sequence_ids_T, values_T)[sequence_ids_T]


def _log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    # Selected, not multiplied: what is not trained on may hold anything, and 0 times infinity is not a number.
    # NaN passes the clamp, so that a broken logprob of a trained token is seen.
    trained_T = mask_T != 0
    difference_T = torch.where(trained_T, logprobs_T, 0.0) - torch.where(trained_T, old_logprobs_T, 0.0)
    return difference_T.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def _indicator(mask_T: Tensor) -> Tensor:
    return (mask_T != 0).to(mask_T.dtype)
