"""The loss of a micro-batch, put together from its settings, and the numbers that describe an update.

The parts, and the papers that they are from, are in :mod:`rollfeed.training.losses`. The divergence is added to each
token's loss and weighted as that is, where GRPO has it (arXiv:2402.03300, section 4.1.1, equation 3); what corrects for
the engine multiplies the clipped loss and not the divergence.

Axes: T trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollfeed.config.train import Correction, LossSettings, Objective, OldLogprobs
from rollfeed.protocols import LossInputs
from rollfeed.training.losses import (
    OwnLoss,
    clipped_policy_loss,
    clipped_tokens,
    importance_ratio,
    importance_weights,
    kl_penalty,
    policy_ratio,
    weighted_policy_loss,
)
from rollfeed.training.model import Scored
from rollfeed.training.packing import MicroBatch
from rollfeed.training.ranks import Ranks
from rollfeed.training.scoring import to_device

_JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "count": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Updates and metrics of one batch."""

    step: int
    """The batch's number."""
    num_updates: int
    """Updates that were made."""
    skipped: tuple[str, ...]
    """Why others were not."""
    metrics: Mapping[str, float]
    """``train/...``; no times."""
    seconds: float
    part_seconds: Mapping[str, float]
    """Of ``seconds``: ``forward`` (losses and metrics included), ``backward`` and ``optimizer`` of the updates; what is
    left is packing and passes without gradient. On a GPU, a part has the time in which the host waited there."""


class Tally:
    """Sums and extremes over trained tokens; order of micro-batches and their sizes do not matter.

    They stay on the device of what is added, where they are added up; only :meth:`metrics` waits for them.
    """

    def __init__(self) -> None:
        self._gathered: dict[str, dict[str, Tensor]] = {kind: {} for kind in _JOINS}

    def add(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Add the values of trained tokens to the sum of this name; what is not trained on does not count."""
        self._add("sum", name, torch.where(mask_T != 0, values_T.detach(), 0.0).double().sum())

    def add_extremes(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Keep the lowest and the highest value of a trained token."""
        trained_T, values_T = mask_T != 0, values_T.detach().double()
        if len(values_T):
            self._add("min", name, torch.where(trained_T, values_T, math.inf).amin())
            self._add("max", name, torch.where(trained_T, values_T, -math.inf).amax())

    def count(self, mask_T: Tensor, *, name: str = "tokens") -> None:
        """Count trained tokens; ``tokens`` are what the sums are divided by."""
        self._add("count", name, (mask_T != 0).double().sum())

    def merge(self, other: Tally) -> None:
        """Take what another one gathered."""
        for kind, values in other._gathered.items():
            for name, value in values.items():
                self._add(kind, name, value)

    def over(self, ranks: Ranks) -> Tally:
        """Return what all ranks have gathered together; they have the same names."""
        if ranks.size == 1:
            return self
        own, found = Tally(), Tally()
        names = [f"{name} ({kind})" for kind, values in self._gathered.items() for name in sorted(values)]
        ranks.check_alike({"the names of their metrics": ", ".join(names)})
        for kind, values in self._gathered.items():
            own._gathered[kind] = {name: value.cpu() for name, value in values.items()}  # a few numbers, once a batch
        for each in ranks.everybodys(own):
            found.merge(each)
        return found

    def metrics(self) -> dict[str, float]:
        """Return means over trained tokens, and ``_min`` and ``_max`` of what has extremes; nothing without tokens."""
        gathered = [(kind, name, value) for kind, values in self._gathered.items() for name, value in values.items()]
        tokens = float(self._gathered["count"].get("tokens", 0.0))
        if tokens == 0:
            return {}
        read = torch.stack([value for _, _, value in gathered]).tolist()
        found = {
            f"{name}_{kind}" if kind in ("min", "max") else name: value / tokens if kind == "sum" else value
            for (kind, name, _), value in zip(gathered, read, strict=True)
        }
        if found.get(_SEEING):
            found[_SEEING_KL] *= tokens / found[_SEEING]
        return found

    def refusal_of_pictures(self, most: float) -> str | None:
        """Return what is wrong where engine and trainer differ by more at samples with pictures; None where they agree.

        ``most`` is in nats a token; 0 asks nothing.
        """
        if most == 0 or _SEEING not in self._gathered["count"]:
            return None
        total, count = (self._gathered[kind][name] for kind, name in (("sum", _SEEING_KL), ("count", _SEEING)))
        divergence = float(total) / max(1.0, float(count))
        # Not "greater than": what is not a number is no agreement.
        if divergence <= most:
            return None
        return (
            f"at answers to prompts with pictures the trainer's probabilities are {divergence:.3g} nats a token from "
            f"the engine's ({_SEEING_KL}), more than train.max_picture_mismatch_kl = {most:g}: they have not seen the "
            "same pictures, or not with the same weights: look at the engine's log, or raise the setting where "
            "policies are meant to differ"
        )

    def _add(self, kind: str, name: str, value: Tensor) -> None:
        own = self._gathered[kind]
        own[name] = _JOINS[kind](own[name], value) if name in own else value


_SEEING, _SEEING_KL = "picture_tokens", "picture_mismatch_kl"


def add_mismatch(
    tally: Tally,
    *,
    trainer_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    seeing_T: Tensor | None = None,
) -> None:
    """Tally how far the trainer's policy is from the engine's, at tokens that the engine sampled.

    ``mismatch_kl`` estimates KL(engine || trainer) by k3, ``mismatch_k1`` by the log-ratio (Schulman, "Approximating KL
    Divergence", 2020); ``mismatch_abs`` are absolute differences of log-probabilities, and ``mismatch_ratio`` the
    trainer's over the engine's probability.
    """
    with torch.no_grad():
        log_ratio_T = trainer_logprobs_T.double() - rollout_logprobs_T.double()
        #: train/mismatch_k1: divergence of the engine from the trainer as the mean of the log-ratio, in nats
        tally.add("mismatch_k1", -log_ratio_T, mask_T)
        #: train/mismatch_kl: divergence of the engine from the trainer by the estimate k3, never below 0, in nats
        tally.add("mismatch_kl", torch.expm1(log_ratio_T) - log_ratio_T, mask_T)
        #: train/mismatch_abs, train/mismatch_abs_min, train/mismatch_abs_max: absolute difference of log-probabilities
        tally.add("mismatch_abs", log_ratio_T.abs(), mask_T)
        tally.add_extremes("mismatch_abs", log_ratio_T.abs(), mask_T)
        #: train/mismatch_ratio_min, train/mismatch_ratio_max: the trainer's over the engine's probability
        tally.add_extremes("mismatch_ratio", torch.exp(log_ratio_T), mask_T)
        if seeing_T is not None:
            #: train/picture_tokens: of `train/tokens`, those of samples with pictures
            tally.count(seeing_T, name=_SEEING)
            #: train/picture_mismatch_kl: as `train/mismatch_kl`, at tokens of samples with pictures
            tally.add(_SEEING_KL, torch.expm1(log_ratio_T) - log_ratio_T, seeing_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenArrays:
    """The arrays of a micro-batch on the device of its log-probabilities."""

    mask_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    rollout_logprobs_T: Tensor
    versions_T: Tensor
    sequence_ids_T: Tensor
    seeing_T: Tensor | None
    """The mask where it is of sequences with pictures, 0 elsewhere; None without any."""
    is_idle: bool
    """Whether nothing of it counts: another rank has one more."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, device: torch.device) -> TokenArrays:
        """Return them as tensors; sequences are numbered from 0."""
        names = ("mask_T", "advantages_T", "weights_T", "rollout_logprobs_T", "versions_T")
        _, number_T = np.unique(micro_batch.sequence_ids_T, return_inverse=True)
        is_seeing_T = micro_batch.is_seeing_T
        seeing_T = micro_batch.mask_T * is_seeing_T if is_seeing_T.any() else None
        return cls(
            **{name: to_device(getattr(micro_batch, name), device) for name in names},
            sequence_ids_T=to_device(number_T, device),
            seeing_T=None if seeing_T is None else to_device(seeing_T, device),
            is_idle=not micro_batch.sample_indices,
        )


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """One micro-batch, with what other policies than the present one say of its tokens."""

    micro_batch: MicroBatch
    learns: bool
    """Whether there is a gradient; else there are metrics only."""
    arrays: TokenArrays
    start_T: Tensor | None
    reference_T: Tensor | None


def micro_batch_loss(
    scored: Scored,
    arrays: TokenArrays,
    *,
    settings: LossSettings,
    start_logprobs_T: Tensor | None,
    reference_logprobs_T: Tensor | None,
    tally: Tally,
    own: OwnLoss | None = None,
    policy_version: int = 0,
) -> Tensor:
    """Return this micro-batch's part of its mini-batch's loss, a scalar with gradient.

    ``start_logprobs_T`` are the trainer's before the batch's first update, by default those of ``scored``;
    ``reference_logprobs_T`` are needed where ``settings.has_divergence``. ``tally`` takes what there is to
    tell. ``own`` is a function of the user's in the place of the clipped loss, told of ``policy_version``.

    Nothing here waits for the device, and nothing around it in a micro-batch but a check of transformers' own in passes
    without branches: what the host wants to know it reads once an update.
    """
    logprobs_T, mask_T = scored.logprobs_T, arrays.mask_T
    #: train/tokens: trained tokens of all updates, those of every epoch counted
    tally.count(mask_T)
    #: train/entropy: of the distribution over the whole vocabulary, in nats
    tally.add("entropy", scored.entropy_T, mask_T)
    balance = _balance(scored, arrays, settings, tally)
    if settings.objective is Objective.CROSS_ENTROPY:  # nobody has sampled the tokens: there is no ratio
        return balance - (logprobs_T * arrays.weights_T).sum()
    trainer_T = logprobs_T.detach() if start_logprobs_T is None else start_logprobs_T
    old_T = trainer_T if settings.old_logprobs is OldLogprobs.TRAINER else arrays.rollout_logprobs_T
    if own is None:
        ids_T = arrays.sequence_ids_T
        ratio_T = policy_ratio(logprobs_T, old_T, mask_T=mask_T, sequence_ids_T=ids_T, level=settings.ratio)
        loss_T = _policy_loss(logprobs_T, ratio_T, arrays, settings)
        _add_clipping(tally, ratio_T.detach(), arrays, settings)
    else:
        loss_T = _own_loss(
            own, scored, arrays, tally, settings, old_T=old_T, reference_T=reference_logprobs_T, version=policy_version
        )
    add_mismatch(
        tally,
        trainer_logprobs_T=trainer_T,
        rollout_logprobs_T=arrays.rollout_logprobs_T,
        mask_T=mask_T,
        seeing_T=arrays.seeing_T,
    )
    if settings.correction is not Correction.NONE:
        loss_T = loss_T * _correction(trainer_T, arrays, settings, tally)
    whole = balance if loss_T.ndim else balance + loss_T
    loss_T = loss_T if loss_T.ndim else torch.zeros_like(logprobs_T)
    if settings.entropy_coefficient:
        loss_T = loss_T - settings.entropy_coefficient * torch.where(mask_T != 0, scored.entropy_T, 0.0)
    if reference_logprobs_T is not None and settings.has_divergence:
        kl_T = kl_penalty(
            logprobs_T, reference_logprobs_T=reference_logprobs_T, mask_T=mask_T, estimator=settings.kl_estimator
        )
        #: train/reference_kl: divergence from the reference, where `train.loss` weighs it, in the loss or in rewards
        tally.add("reference_kl", kl_T, mask_T)
        loss_T = loss_T + settings.kl_coefficient * kl_T
    return (loss_T * arrays.weights_T).sum() + whole


def _balance(scored: Scored, arrays: TokenArrays, settings: LossSettings, tally: Tally) -> Tensor | float:
    """Return the routers' part of the loss: that of the micro-batch, weighted as if it were each token's."""
    if scored.balance is None:
        return 0.0
    mask_T, load_X = arrays.mask_T, scored.balance.load_EX.flatten()
    #: train/router_aux_loss: load-balancing loss of the routers, where `train.loss.router_aux_loss_coefficient` is set
    tally.add("router_aux_loss", scored.balance.loss.expand(len(mask_T)), mask_T)
    #: train/expert_load_min, train/expert_load_max: an expert's tokens in a layer and pass, 1 where all have as many
    tally.add_extremes("expert_load", load_X, torch.full_like(load_X, not arrays.is_idle))
    return settings.router_aux_loss_coefficient * scored.balance.loss * arrays.weights_T.sum()


def _own_loss(
    own: OwnLoss,
    scored: Scored,
    arrays: TokenArrays,
    tally: Tally,
    settings: LossSettings,
    *,
    old_T: Tensor,
    reference_T: Tensor | None,
    version: int,
) -> Tensor:
    """Return what a user's function says, of each token ``(T,)`` or as a whole ``()``."""
    names = ("rollout_logprobs_T", "advantages_T", "mask_T", "weights_T", "versions_T", "sequence_ids_T")
    inputs = LossInputs(
        logprobs_T=scored.logprobs_T,
        entropy_T=scored.entropy_T,
        old_logprobs_T=old_T,
        reference_logprobs_T=reference_T,
        policy_version=version,
        settings=settings,
        **{name: getattr(arrays, name) for name in names},
    )
    loss, metrics = own(inputs)
    mask_T = arrays.mask_T
    for name, values_T in sorted(metrics.items()):
        #: train/loss_function/<name>: what `train.loss.function` returns as a metric
        tally.add(f"loss_function/{name}", values_T, mask_T)
    if arrays.is_idle:  # it has been asked for the names
        return 0.0 * scored.logprobs_T
    return torch.where(mask_T != 0, loss, 0.0) if loss.ndim else loss


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
    #: train/clipped_low_ratio: share of tokens that the lower bound of the ratio keeps from a gradient
    tally.add("clipped_low_ratio", low_T, mask_T)
    #: train/clipped_high_ratio: the same of the upper bound
    tally.add("clipped_high_ratio", high_T, mask_T)
    if settings.dual_clip > 0:
        #: train/dual_clipped_ratio: share of tokens beyond `train.loss.dual_clip`
        tally.add("dual_clipped_ratio", (ratio_T > settings.dual_clip) & (advantages_T < 0), mask_T)
    #: train/policy_ratio_min, train/policy_ratio_max: of the new over the old probability
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
    #: train/correction_weight: the weight that corrects for the engine, where `train.loss.correction` asks for it
    tally.add("correction_weight", weights_T, mask_T)
    #: train/corrected_ratio: share of tokens whose weight was cut or masked
    tally.add("corrected_ratio", weights_T != ratio_T, mask_T)
    return weights_T
