"""Every loss and its gradient against the formulas, written again here for one sequence after the other in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.config.train import Correction, KLEstimator, Normalisation, RatioLevel
from rollfeed.training.losses import (
    clipped_policy_loss,
    clipped_tokens,
    importance_ratio,
    importance_weights,
    kl_penalty,
    policy_ratio,
    token_weights,
    weighted_policy_loss,
)

LOW, HIGH = 0.2, 0.28
LENGTHS = (5, 1, 0, 7, 4, 3)
"""Of the sequences; one response is empty."""
ROLLOUTS = (0, 1, 2, 3, 3, 4)
"""The fourth and fifth sequence are forks of one rollout."""
ADVANTAGES = (1.3, -0.7, 2.0, 0.4, 0.4, -1.1)


@dataclass
class Packed:
    """Sequences one behind the other; what is masked holds values that would spoil any sum."""

    logprobs: NDArray[np.float64]
    old: NDArray[np.float64]
    rollout: NDArray[np.float64]
    reference: NDArray[np.float64]
    mask: NDArray[np.float64]
    sequence: NDArray[np.int64] = field(default_factory=lambda: np.repeat(np.arange(len(LENGTHS)), LENGTHS))

    @property
    def rollout_ids(self) -> NDArray[np.int64]:
        return np.array(ROLLOUTS)[self.sequence]

    @property
    def advantages(self) -> NDArray[np.float64]:
        return np.array(ADVANTAGES)[self.sequence]

    def sequences(self) -> list[list[int]]:
        """The trained places of each sequence."""
        return [[t for t in np.flatnonzero(self.sequence == s) if self.mask[t] != 0] for s in range(len(LENGTHS))]


def packed(seed: int, *, spread: float = 0.4, mask: str = "some") -> Packed:
    rng = np.random.default_rng(seed)
    total = sum(LENGTHS)
    old = -rng.random(total) * 4
    masks = {
        "all": np.ones(total),
        "some": (rng.random(total) < 0.7).astype(float),
        "weights": rng.random(total) * (rng.random(total) < 0.8),
        "none": np.zeros(total),
    }
    arrays = Packed(
        logprobs=old + rng.normal(0, spread, total),
        old=old,
        rollout=old + rng.normal(0, 1.0, total),
        reference=old + rng.normal(0, 0.5, total),
        mask=masks[mask],
    )
    for spoiled, value in ((arrays.old, np.nan), (arrays.rollout, -np.inf), (arrays.reference, 1e9)):
        spoiled[arrays.mask == 0] = value
    return arrays


def clip(value: float) -> float:
    return min(max(value, 1 - LOW), 1 + HIGH)


def reference_token_losses(p: Packed, logprobs: NDArray[np.float64]) -> dict[int, float]:
    losses = {}
    for places in p.sequences():
        for t in places:
            ratio, advantage = math.exp(logprobs[t] - p.old[t]), p.advantages[t]
            losses[t] = -min(ratio * advantage, clip(ratio) * advantage)
    return losses


def reference_sequence_losses(p: Packed, logprobs: NDArray[np.float64]) -> dict[int, float]:
    losses = {}
    for places in p.sequences():
        if not places:
            continue
        total = sum(p.mask[t] * (logprobs[t] - p.old[t]) for t in places)
        ratio = math.exp(total / sum(p.mask[t] for t in places))
        for t in places:
            losses[t] = -min(ratio * p.advantages[t], clip(ratio) * p.advantages[t])
    return losses


def reference_kl(p: Packed, logprobs: NDArray[np.float64], estimator: KLEstimator) -> dict[int, float]:
    losses = {}
    for places in p.sequences():
        for t in places:
            r = math.exp(p.reference[t] - logprobs[t])
            losses[t] = {
                KLEstimator.K1: -math.log(r),
                KLEstimator.K2: 0.5 * math.log(r) ** 2,
                KLEstimator.K3: (r - 1) - math.log(r),
            }[estimator]
    return losses


def reference_sum(p: Packed, losses: dict[int, float], normalisation: Normalisation) -> float:
    """Add up rollout by rollout, as the papers' sums are written."""
    rollouts: dict[int, list[int]] = {}
    for t in losses:
        rollouts.setdefault(int(p.rollout_ids[t]), []).append(t)
    if not rollouts:
        return 0.0
    sums = {r: sum(p.mask[t] * losses[t] for t in places) for r, places in rollouts.items()}
    sizes = {r: sum(p.mask[t] for t in places) for r, places in rollouts.items()}
    if normalisation is Normalisation.TOKEN:
        return float(sum(sums.values()) / sum(sizes.values()))
    if normalisation is Normalisation.SEQUENCE:
        return float(np.mean([sums[r] / sizes[r] for r in rollouts]))
    return float(np.mean([sums[r] / 11 for r in rollouts]))


def finite_differences(function: Callable[[NDArray[np.float64]], float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    gradient = np.zeros_like(x)
    for t in range(len(x)):
        step = np.zeros_like(x)
        step[t] = 1e-6
        gradient[t] = (function(x + step) - function(x - step)) / 2e-6
    return gradient


def arguments(p: Packed, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        "advantages_T": torch.from_numpy(p.advantages).to(dtype),
        "mask_T": torch.from_numpy(p.mask).to(dtype),
    }


def ratio(p: Packed, logprobs: Tensor, level: RatioLevel = RatioLevel.TOKEN) -> Tensor:
    return policy_ratio(
        logprobs,
        torch.from_numpy(p.old).to(logprobs.dtype),
        mask_T=torch.from_numpy(p.mask).to(logprobs.dtype),
        sequence_ids_T=torch.from_numpy(p.sequence),
        level=level,
    )


def clipped(p: Packed, logprobs: Tensor, level: RatioLevel = RatioLevel.TOKEN, *, dual_clip: float = 0.0) -> Tensor:
    return clipped_policy_loss(
        ratio(p, logprobs, level),
        **arguments(p, logprobs.dtype),
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=dual_clip,
    )


def correction_of(p: Packed, correction: Correction, level: RatioLevel = RatioLevel.TOKEN) -> Tensor:
    mask = torch.from_numpy(p.mask)
    ratios = importance_ratio(
        torch.from_numpy(p.old),
        rollout_logprobs_T=torch.from_numpy(p.rollout),
        mask_T=mask,
        sequence_ids_T=torch.from_numpy(p.sequence),
        level=level,
    )
    return importance_weights(ratios, mask_T=mask, correction=correction, low=0.5, high=2.0)


def one_token(log_ratio: float, advantage: float, **bounds: float) -> float:
    """Return the gradient of the clipped loss of one token."""
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    ones = torch.ones(1)
    level = RatioLevel.TOKEN
    ratios = policy_ratio(logprobs, torch.zeros(1), mask_T=ones, sequence_ids_T=torch.zeros(1).long(), level=level)
    clipped_policy_loss(ratios, advantages_T=advantage * ones, mask_T=ones, **bounds).sum().backward()
    return float(logprobs.grad)


def weights(p: Packed, normalisation: Normalisation, dtype: torch.dtype = torch.float64) -> Tensor:
    values = token_weights(p.mask, p.rollout_ids, normalisation=normalisation, constant_length=11)
    return torch.from_numpy(values).to(dtype)


def check(
    p: Packed,
    losses: Callable[[Tensor], Tensor],
    reference: Callable[[NDArray[np.float64]], dict[int, float]],
    normalisation: Normalisation,
) -> None:
    logprobs = torch.from_numpy(p.logprobs.copy()).requires_grad_()
    loss = (losses(logprobs) * weights(p, normalisation)).sum()
    loss.backward()
    # The weights are float32.
    np.testing.assert_allclose(
        loss.item(), reference_sum(p, reference(p.logprobs), normalisation), rtol=1e-6, atol=1e-9
    )
    expected = finite_differences(lambda x: reference_sum(p, reference(x), normalisation), p.logprobs)
    np.testing.assert_allclose(logprobs.grad, expected, rtol=1e-5, atol=1e-8)
    assert not logprobs.grad[torch.from_numpy(p.mask == 0)].any()


@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize("mask", ["all", "some", "weights", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_clipped_loss_and_gradient_are_the_formula(seed: int, mask: str, normalisation: Normalisation) -> None:
    """GRPO, Dr. GRPO, DAPO and REINFORCE++ are this loss with the three normalisations."""
    p = packed(seed, mask=mask)
    check(
        p,
        lambda x: clipped(p, x),
        lambda x: reference_token_losses(p, x),
        normalisation,
    )


@pytest.mark.parametrize("normalisation", Normalisation)
@pytest.mark.parametrize("mask", ["all", "some", "weights", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_sequence_clipped_loss_and_gradient_are_the_formula_of_gspo(
    seed: int, mask: str, normalisation: Normalisation
) -> None:
    p = packed(seed, mask=mask, spread=0.6)
    check(
        p,
        lambda x: clipped(p, x, RatioLevel.SEQUENCE),
        lambda x: reference_sequence_losses(p, x),
        normalisation,
    )


def test_gspo_is_the_mean_of_sequence_losses() -> None:
    """Equation 5: with unforked rollouts each sequence counts once, whatever its length."""
    p = packed(4, mask="all")
    losses = clipped(p, torch.from_numpy(p.logprobs), RatioLevel.SEQUENCE)
    own = token_weights(p.mask, p.sequence, normalisation=Normalisation.SEQUENCE)
    each = [reference_sequence_losses(p, p.logprobs)[places[0]] for places in p.sequences() if places]
    assert float((losses * torch.from_numpy(own)).sum()) == pytest.approx(np.mean(each), rel=1e-6)


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K2, KLEstimator.K3])
@pytest.mark.parametrize("mask", ["all", "some", "none"])
def test_kl_and_its_gradient_are_the_formula(mask: str, estimator: KLEstimator) -> None:
    p = packed(7, mask=mask)
    check(
        p,
        lambda x: kl_penalty(
            x,
            reference_logprobs_T=torch.from_numpy(p.reference),
            mask_T=torch.from_numpy(p.mask),
            estimator=estimator,
        ),
        lambda x: reference_kl(p, x, estimator),
        Normalisation.SEQUENCE,
    )


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_the_divergence() -> None:
    """Over all tokens of a vocabulary, as often as the policy samples them, the gradient is that of KL itself."""
    rng = np.random.default_rng(0)
    logits, reference = (torch.from_numpy(rng.normal(size=6)) for _ in range(2))
    gradients = {}
    for estimator in (KLEstimator.K3, KLEstimator.K3_PLUS):
        own = logits.clone().requires_grad_()
        logprobs = torch.log_softmax(own, -1)
        values = kl_penalty(
            logprobs,
            reference_logprobs_T=torch.log_softmax(reference, -1),
            mask_T=torch.ones(6, dtype=torch.float64),
            estimator=estimator,
        )
        (logprobs.detach().exp() * values).sum().backward()
        gradients[estimator] = (values.detach(), own.grad)
    exact = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(exact, -1)
    (logprobs.exp() * (logprobs - torch.log_softmax(reference, -1))).sum().backward()
    torch.testing.assert_close(gradients[KLEstimator.K3_PLUS][0], gradients[KLEstimator.K3][0])
    torch.testing.assert_close(gradients[KLEstimator.K3_PLUS][1], exact.grad)
    assert not torch.allclose(gradients[KLEstimator.K3][1], exact.grad)


@pytest.mark.parametrize("level", RatioLevel)
@pytest.mark.parametrize("correction", [Correction.TRUNCATE, Correction.MASK])
def test_importance_correction_is_the_formula_and_has_no_gradient(correction: Correction, level: RatioLevel) -> None:
    p = packed(3, mask="some")
    p.rollout[:] = np.where(p.mask != 0, p.old + 0.6 * (p.rollout - p.old), p.rollout)
    got = correction_of(p, correction, level)
    expected = np.zeros(len(p.mask))
    for places in p.sequences():
        product = math.exp(sum(p.old[t] - p.rollout[t] for t in places))
        for t in places:
            one = product if level is RatioLevel.SEQUENCE else math.exp(p.old[t] - p.rollout[t])
            expected[t] = min(one, 2.0) if correction is Correction.TRUNCATE else one * (0.5 <= one <= 2.0)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert not got.requires_grad
    assert len(np.unique(expected > 0)) == 2
    assert (expected[p.mask != 0] == 2.0).any() or correction is Correction.MASK


@pytest.mark.parametrize("ratio_level", RatioLevel)
@pytest.mark.parametrize("level", RatioLevel)
@pytest.mark.parametrize("correction", Correction)
def test_a_corrected_gradient_is_that_of_each_token_times_its_weight(
    correction: Correction, level: RatioLevel, ratio_level: RatioLevel
) -> None:
    """With a ratio of sequences too: what a mask takes out takes its part of the gradient, and no other's."""
    p = packed(5, mask="some")
    p.rollout[:] = np.where(p.mask != 0, p.old + 0.9 * (p.rollout - p.old), p.rollout)
    weight = correction_of(p, correction, level)
    gradients = []
    for factor in (torch.ones(len(p.mask), dtype=torch.float64), weight):
        logprobs = torch.from_numpy(p.logprobs.copy()).requires_grad_()
        (clipped(p, logprobs, ratio_level) * factor * weights(p, Normalisation.SEQUENCE)).sum().backward()
        gradients.append(logprobs.grad)
    np.testing.assert_allclose(gradients[1], gradients[0] * weight, rtol=1e-12)
    assert (gradients[0][torch.from_numpy(p.mask != 0)] != 0).any()
    taken_out = (weight == 0) & torch.from_numpy(p.mask != 0)
    assert bool(taken_out.any()) is (correction is Correction.MASK)


def test_no_correction_is_a_weight_of_one() -> None:
    p = packed(3, mask="weights")
    np.testing.assert_array_equal(correction_of(p, Correction.NONE), (p.mask != 0).astype(float))


@pytest.mark.parametrize("level", RatioLevel)
@pytest.mark.parametrize("mask", ["all", "some", "weights", "none"])
def test_cispo_weights_the_gradient_of_each_log_probability_by_its_clipped_ratio(mask: str, level: RatioLevel) -> None:
    p = packed(6, mask=mask, spread=0.6)
    logprobs = torch.from_numpy(p.logprobs.copy()).requires_grad_()
    losses = weighted_policy_loss(
        logprobs, ratio_T=ratio(p, logprobs, level), **arguments(p), clip_low=LOW, clip_high=HIGH
    )
    losses.sum().backward()
    expected = np.zeros(len(p.mask))
    for places in p.sequences():
        total = sum(p.mask[t] for t in places)
        mean = sum(p.mask[t] * (p.logprobs[t] - p.old[t]) for t in places) / total if total else 0.0
        for t in places:
            one = math.exp(mean if level is RatioLevel.SEQUENCE else p.logprobs[t] - p.old[t])
            expected[t] = -clip(one) * p.advantages[t]
    np.testing.assert_allclose(logprobs.grad, expected, rtol=1e-12)
    np.testing.assert_allclose(losses.detach(), expected * np.where(p.mask != 0, p.logprobs, 0.0), rtol=1e-12)


@pytest.mark.parametrize("log_ratio", [1.2, 3.0, 8.0, 19.9])
def test_dual_clip_bounds_the_gradient_of_negative_advantages(log_ratio: float) -> None:
    bounds = {"clip_low": LOW, "clip_high": HIGH}
    assert one_token(log_ratio, -1.0, **bounds) == pytest.approx(math.exp(log_ratio), rel=1e-5)
    assert one_token(log_ratio, -1.0, **bounds, dual_clip=3.0) == 0.0
    assert one_token(1.0, -1.0, **bounds, dual_clip=3.0) == pytest.approx(math.e, rel=1e-5)
    assert one_token(log_ratio, 1.0, **bounds, dual_clip=3.0) == 0.0
    assert one_token(-log_ratio, 1.0, **bounds, dual_clip=3.0) == pytest.approx(-math.exp(-log_ratio), rel=1e-5)


def test_dual_clipped_losses_are_the_formula() -> None:
    p = packed(1, mask="all", spread=2.5)
    plain = reference_token_losses(p, p.logprobs)
    expected = {t: min(loss, -3.0 * p.advantages[t]) if p.advantages[t] < 0 else loss for t, loss in plain.items()}
    got = clipped(p, torch.from_numpy(p.logprobs), dual_clip=3.0)
    np.testing.assert_allclose(got, [expected.get(t, 0.0) for t in range(len(p.mask))], rtol=1e-12)
    assert expected != plain


def test_float32_agrees_with_float64() -> None:
    p = packed(9, mask="some")
    exact, rough = [
        clipped(p, torch.from_numpy(p.logprobs).to(dtype)).double() for dtype in (torch.float64, torch.float32)
    ]
    np.testing.assert_allclose(rough, exact, rtol=1e-5, atol=1e-6)


def test_a_higher_upper_bound_lets_unlikely_tokens_grow_further() -> None:
    gradients = [one_token(math.log(1.25), 1.0, clip_low=0.2, clip_high=clip_high) for clip_high in (0.2, 0.28)]
    assert gradients[0] == 0.0
    assert gradients[1] == pytest.approx(-1.25)


def test_clipped_tokens_are_those_without_gradient() -> None:
    p = packed(11, mask="some", spread=0.6)
    logprobs = torch.from_numpy(p.logprobs.copy()).requires_grad_()
    clipped(p, logprobs).sum().backward()
    mask = torch.from_numpy(p.mask)
    low, high = clipped_tokens(
        ratio(p, logprobs.detach()),
        advantages_T=torch.from_numpy(p.advantages),
        mask_T=mask,
        clip_low=LOW,
        clip_high=HIGH,
    )
    assert low.any()
    assert high.any()
    np.testing.assert_array_equal(low | high, (logprobs.grad == 0) & (mask != 0))


def of_two(logprobs: Tensor) -> Tensor:
    """Return the ratios of two tokens to a policy that finds them certain."""
    return policy_ratio(
        logprobs, torch.zeros(2), mask_T=torch.ones(2), sequence_ids_T=torch.arange(2), level=RatioLevel.TOKEN
    )


def test_far_apart_policies_give_finite_losses() -> None:
    ones = torch.ones(2)
    for difference in (500.0, -500.0):
        logprobs = torch.tensor([difference, difference], requires_grad=True)
        loss = (
            clipped_policy_loss(
                of_two(logprobs), advantages_T=torch.tensor([1.0, -1.0]), mask_T=ones, clip_low=0.2, clip_high=0.2
            ).sum()
            + kl_penalty(logprobs, reference_logprobs_T=torch.zeros(2), mask_T=ones, estimator=KLEstimator.K3).sum()
        )
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()


def test_a_broken_logprob_of_a_trained_token_is_not_hidden() -> None:
    ones = torch.ones(2)
    ratios = of_two(torch.tensor([float("nan"), 0.0]))
    loss = clipped_policy_loss(ratios, advantages_T=ones, mask_T=ones, clip_low=0.2, clip_high=0.2)
    assert torch.isnan(loss).tolist() == [True, False]
