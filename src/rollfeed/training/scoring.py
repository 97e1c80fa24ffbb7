"""Log-probabilities and entropies of tokens, from hidden states or logits, a few tokens at a time.

Logits of all tokens are never there at once: of what the head makes of some tokens two or three numbers a token are
kept, and on the way back the head computes again. As long as there are few tokens their logits are kept instead. The
memory is then the same for any number of tokens, but for what the model itself takes.

A token that was drawn from a part of the vocabulary, because of top-k, top-p or suppressed ends, has its probability
among these tokens, as the engine's has: for equal weights their ratio is 1, and what could not be drawn is left as it
is. The two policies of a ratio are compared on the same tokens.

Source: "Keep Sampling Mask" in DeepSeek-V3.2 (arXiv:2512.02556).

Axes: D hidden size, V vocabulary, T trained tokens, R some of them, M tokens that some of them were drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.model_files.heads import Head, HeadShape
from rollfeed.model_files.products import add_product
from rollfeed.model_files.products import product as matrix_product
from rollfeed.types import SamplingMask


class ChunkSizes(NamedTuple):
    """Logits at a time, as elements."""

    product: int
    """Computed by one product: what bounds the memory."""
    exponents: int
    """Exponentiated at once, of these."""
    kept: int
    """Kept for the way back, and not computed again."""


_CPU_SIZES = ChunkSizes(product=1 << 24, exponents=1 << 20, kept=1 << 26)
_GPU_SIZES = ChunkSizes(product=1 << 28, exponents=1 << 28, kept=1 << 28)
"""A GPU wants large pieces, a CPU those that stay in its cache."""

_SUMS_STAY_WIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
"""Whether a GPU's products of bf16 can be in fp32."""


def score_tokens(
    rows_TX: Tensor,
    *,
    target_T: Tensor,
    temperature: float,
    head: Head | None = None,
    dtype: torch.dtype | None = None,
    drawn_from: SamplingMask | None = None,
    sizes: ChunkSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of ``target_T``, and the entropy of what predicts it, ``(T,)`` each.

    Args:
        rows_TX: For each token the hidden state that predicts it, ``(T, D)``; without a head its logits, ``(T, V)``.
        target_T: The tokens.
        temperature: What the logits are divided by.
        head: What makes logits of hidden states.
        dtype: What the head's products are computed in, by default the type of ``rows_TX``; all else is in fp32 at
            least.
        drawn_from: The tokens that each was drawn from. The entropy is that of the whole vocabulary always.
        sizes: Of the pieces; by default those of the device.
    """
    dtype = dtype or rows_TX.dtype
    plan = _Plan(
        temperature=temperature,
        shape=head.shape if head else HeadShape(),
        product_dtype=dtype,
        dtype=torch.promote_types(dtype, torch.float32),
        drawn_from=drawn_from,
        sizes=sizes or (_GPU_SIZES if rows_TX.device.type == "cuda" else _CPU_SIZES),
        keeps=head is not None and torch.is_grad_enabled(),
    )
    weight, bias = (head.weight_VD, head.bias_V) if head else (None, None)
    logprobs_T, entropy_T = _ScoreTokens.apply(rows_TX, weight, bias, target_T, plan)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    temperature: float
    shape: HeadShape
    product_dtype: torch.dtype
    dtype: torch.dtype
    drawn_from: SamplingMask | None
    sizes: ChunkSizes
    keeps: bool

    def scaled(self, product: Tensor) -> Tensor:
        """Return the logits over the temperature, in new memory unless they are the product."""
        logits = self.shape.apply(product)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def drawn(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return rows and ids of what some tokens were drawn from, ``(M,)`` each, and which tokens those are."""
        if self.drawn_from is None:
            return None
        ends = np.cumsum(self.drawn_from.lengths, dtype=np.int64)
        lengths = self.drawn_from.lengths[start:end]
        ids = self.drawn_from.token_ids[ends[start] - lengths[0] : ends[end - 1]].astype(np.int64)
        arrays = (np.repeat(np.arange(end - start), lengths), ids, lengths > 0)
        row_M, id_M, is_drawn_R = (to_device(each, device) for each in arrays)
        return row_M, id_M, is_drawn_R


class _Product:
    """The head's products, in the type that it computes in."""

    def __init__(self, rows_TX: Tensor, weight_VD: Tensor | None, bias_V: Tensor | None, plan: _Plan) -> None:
        self._rows_TX, self._plan, self._bias_V = rows_TX, plan, bias_V
        self.weight_VD = None if weight_VD is None else weight_VD.to(plan.product_dtype)
        self.num_logits: int = rows_TX.shape[1] if weight_VD is None else weight_VD.shape[0]

    def rows(self, start: int, end: int) -> Tensor:
        return self._rows_TX[start:end].to(self._plan.product_dtype)

    def logits(self, start: int, end: int) -> Tensor:
        """Return some tokens' products, ``(R, V)``; they may be written over where there is a head."""
        rows_RX, dtype = self.rows(start, end), self._plan.dtype
        if self.weight_VD is None:
            return rows_RX.to(dtype)
        logits_RV = _product(rows_RX, self.weight_VD.t(), dtype)
        return logits_RV if self._bias_V is None else logits_RV.add_(self._bias_V.to(dtype))


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, rows_TX: Tensor, weight_VD: Tensor | None, bias_V: Tensor | None, target_T: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        product = _Product(rows_TX, weight_VD, bias_V, plan)
        logprobs_T = torch.empty(len(rows_TX), dtype=plan.dtype, device=rows_TX.device)
        normaliser_T, drawn_normaliser_T, entropy_T = (torch.empty_like(logprobs_T) for _ in range(3))
        kept: dict[int, Tensor] = {}
        room = plan.sizes.kept if plan.keeps else 0
        for start, end in _spans(0, len(rows_TX), product.num_logits, plan.sizes.product):
            logits_RV = product.logits(start, end)
            for first, last in _spans(start, end, product.num_logits, plan.sizes.exponents):
                part = slice(first, last)
                scaled_RV = plan.scaled(logits_RV[first - start : last - start])
                chosen_R = scaled_RV.gather(1, target_T[part, None])[:, 0]
                drawn = plan.drawn(first, last, rows_TX.device)
                drawn_M = None if drawn is None else scaled_RV[drawn[0], drawn[1]]
                normaliser_T[part], entropy_T[part] = _normalise(scaled_RV)
                drawn_normaliser_T[part] = normaliser_T[part]
                if drawn is not None and drawn_M is not None:
                    drawn_normaliser_T[part] = _normalisers(drawn_M, drawn[0], normaliser_T[part])
                logprobs_T[part] = chosen_R - drawn_normaliser_T[part]
            if logits_RV.numel() <= room:
                kept[start], room = logits_RV, room - logits_RV.numel()
        context.save_for_backward(rows_TX, weight_VD, bias_V, target_T, normaliser_T, drawn_normaliser_T, entropy_T)
        context.plan, context.kept = plan, kept
        context.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rows_TX, weight_VD, bias_V, target_T, *known = context.saved_tensors
        plan: _Plan = context.plan
        product = _Product(rows_TX, weight_VD, bias_V, plan)
        needs_rows, needs_weight, needs_bias, *_ = context.needs_input_grad
        rows_gradient_TX = torch.empty_like(rows_TX) if needs_rows else None
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=plan.dtype) if needs_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=plan.dtype) if needs_bias else None
        for start, end in _spans(0, len(rows_TX), product.num_logits, plan.sizes.product):
            logits_RV = context.kept.pop(start, None)
            if logits_RV is None:
                logits_RV = product.logits(start, end)
            gradient_RV = torch.empty_like(logits_RV) if weight_VD is None else logits_RV
            for first, last in _spans(start, end, product.num_logits, plan.sizes.exponents):
                rows = slice(first - start, last - start)
                gradient_RV[rows] = _gradient(logits_RV[rows], first, last, target_T, known, gradients, plan)
            if bias_gradient_V is not None:
                bias_gradient_V += gradient_RV.sum(dim=0)
            if product.weight_VD is None:
                if rows_gradient_TX is not None:
                    rows_gradient_TX[start:end] = gradient_RV
                continue
            gradient_RV = gradient_RV.to(plan.product_dtype)
            if rows_gradient_TX is not None:
                rows_gradient_TX[start:end] = matrix_product(gradient_RV, product.weight_VD)
            if weight_gradient_VD is not None:
                _add_product(weight_gradient_VD, gradient_RV.t(), product.rows(start, end))
        return rows_gradient_TX, weight_gradient_VD, bias_gradient_V, None, None


def _normalise(scaled_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the sum of exponentials, and the entropy, ``(R,)`` each."""
    peak_R1 = scaled_RV.amax(dim=1, keepdim=True)
    # A logit of -inf has probability 0, and brings no entropy.
    below_RV = (scaled_RV - peak_R1).clamp_min_(torch.finfo(scaled_RV.dtype).min)
    share_RV = below_RV.exp()
    total_R = share_RV.sum(dim=1)
    logarithm_R = total_R.log()
    return peak_R1[:, 0] + logarithm_R, logarithm_R - share_RV.mul_(below_RV).sum(dim=1) / total_R


def _gradient(
    product_RV: Tensor,
    first: int,
    last: int,
    target_T: Tensor,
    known: list[Tensor],
    gradients: tuple[Tensor | None, ...],
    plan: _Plan,
) -> Tensor:
    """Return the gradient of the head's products of some tokens, ``(R, V)``."""
    normaliser_R, drawn_normaliser_R, entropy_R = (each[first:last, None] for each in known)
    logprob_gradient_R, entropy_gradient_R = (None if each is None else each[first:last, None] for each in gradients)
    scaled_RV = plan.scaled(product_RV)
    bend_RV = None if plan.shape.cap is None else 1.0 - (scaled_RV * (plan.temperature / plan.shape.cap)).square_()
    drawn = plan.drawn(first, last, product_RV.device)
    drawn_M = None if drawn is None else scaled_RV[drawn[0], drawn[1]]
    relative_RV = scaled_RV - normaliser_R
    gradient_RV = relative_RV.exp_() if entropy_gradient_R is None else relative_RV.exp()
    if logprob_gradient_R is None:
        logprob_gradient_R = torch.zeros_like(normaliser_R)
    minus_R = -logprob_gradient_R if drawn is None else logprob_gradient_R.neg().masked_fill_(drawn[2][:, None], 0.0)
    if entropy_gradient_R is None:
        gradient_RV.mul_(minus_R)
    else:
        relative_RV.clamp_min_(torch.finfo(relative_RV.dtype).min).add_(entropy_R).mul_(-entropy_gradient_R)
        gradient_RV.mul_(relative_RV.add_(minus_R))
    if drawn is not None and drawn_M is not None:
        row_M, id_M, _ = drawn
        share_M = torch.exp(drawn_M - drawn_normaliser_R[row_M, 0])
        gradient_RV.index_put_((row_M, id_M), -logprob_gradient_R[row_M, 0] * share_M, accumulate=True)
    gradient_RV.scatter_add_(1, target_T[first:last, None], logprob_gradient_R)
    if bend_RV is not None:
        gradient_RV.mul_(bend_RV)
    return gradient_RV.mul_(plan.shape.scale / plan.temperature)


def _normalisers(scaled_M: Tensor, row_M: Tensor, otherwise_R: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each token's part, ``(R,)``; where it has none, the other."""
    peak_R = torch.full_like(otherwise_R, -torch.inf).scatter_reduce(0, row_M, scaled_M, "amax")
    total_R = torch.zeros_like(otherwise_R).index_add(0, row_M, torch.exp(scaled_M - peak_R[row_M]))
    return torch.where(total_R > 0, peak_R + total_R.log(), otherwise_R)


def _product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product in another type than its factors', which is rounded to theirs where there is no other way."""
    if first.is_cuda and first.dtype != dtype and _SUMS_STAY_WIDE:
        return torch.mm(first, second, out_dtype=dtype)
    return matrix_product(first, second).to(dtype)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    if total.dtype == first.dtype:
        add_product(total, first, second)
    elif total.is_cuda and _SUMS_STAY_WIDE:
        torch.addmm(total, first, second, out_dtype=total.dtype, out=total)
    else:
        total += first @ second


def _spans(start: int, end: int, num_logits: int, num_elements: int) -> Iterator[tuple[int, int]]:
    num_rows = max(1, num_elements // max(1, num_logits))
    for first in range(start, end, num_rows):
        yield first, min(first + num_rows, end)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor there, without waiting for what the device computes; on a CPU it is a view."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
