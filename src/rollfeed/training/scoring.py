"""Log-probabilities of tokens from logits, with a gradient that takes no more memory than the logits do.

A token that was drawn from a part of the vocabulary, because of top-k, top-p or suppressed ends, has its probability
among these tokens, as the engine's has: for equal weights their ratio is 1, and what could not be drawn is left as it
is. The two policies of a ratio are compared on the same tokens.

Source: "Keep Sampling Mask" in DeepSeek-V3.2 (arXiv:2512.02556).

Axes: V vocabulary, N places with logits, T trained tokens, M tokens that some of them were drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits that are exponentiated at a time: what bounds the memory beside the logits themselves."""


class DrawnFrom(NamedTuple):
    """Parts of the vocabulary that tokens were drawn from; those that are not named are drawn from all of it."""

    token_M: Tensor
    """Which of the T tokens it is for."""
    id_M: Tensor


def score_tokens(
    logits_NV: Tensor, *, place_T: Tensor, target_T: Tensor, temperature: float, drawn_from: DrawnFrom | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of ``target_T`` at ``place_T`` ``(T,)``, and each place's entropy ``(N,)``.

    Computed in fp32 at least, a few rows at a time: beside the logits there is only their gradient in memory. The
    entropy is that of the whole vocabulary always.
    """
    apply = _ScoreTokens.apply
    logprobs_T, entropy_N = apply(logits_NV, place_T, target_T, temperature, *(drawn_from or (None, None)))  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_N


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        logits_NV: Tensor,
        place_T: Tensor,
        target_T: Tensor,
        temperature: float,
        token_M: Tensor | None,
        id_M: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        normaliser_N = torch.empty(len(logits_NV), dtype=dtype, device=logits_NV.device)
        entropy_N = torch.empty_like(normaliser_N)
        for start, end in _chunks(logits_NV):
            scaled = logits_NV[start:end].to(dtype) / temperature
            normaliser_N[start:end] = torch.logsumexp(scaled, dim=1)
            centred = scaled - normaliser_N[start:end, None]
            # A logit of -inf has probability 0, and brings no entropy.
            entropy_N[start:end] = -(centred.exp() * centred.clamp_min(torch.finfo(dtype).min)).sum(dim=1)
        normaliser_T = normaliser_N[place_T]
        if token_M is not None and id_M is not None:
            scaled_M = logits_NV[place_T[token_M], id_M].to(dtype) / temperature
            normaliser_T = _normalisers(scaled_M, token_M, normaliser_T)
        chosen_T = logits_NV[place_T, target_T].to(dtype) / temperature
        context.save_for_backward(logits_NV, normaliser_N, normaliser_T, place_T, target_T, token_M, id_M)
        context.temperature = temperature
        context.mark_non_differentiable(entropy_N)
        return chosen_T - normaliser_T, entropy_N

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits_NV, normaliser_N, normaliser_T, place_T, target_T, token_M, id_M = context.saved_tensors
        gradient_T = gradients[0] / context.temperature
        dtype = normaliser_N.dtype
        everywhere_T = gradient_T if token_M is None else gradient_T.index_fill(0, token_M, 0.0)
        total_N = torch.zeros_like(normaliser_N).index_add_(0, place_T, everywhere_T)
        gradient_NV = torch.empty_like(logits_NV)
        for start, end in _chunks(logits_NV):
            scaled = logits_NV[start:end].to(dtype) / context.temperature
            gradient_NV[start:end] = (scaled - normaliser_N[start:end, None]).exp_().mul_(-total_N[start:end, None])
        if token_M is not None:
            place_M = place_T[token_M]
            scaled_M = logits_NV[place_M, id_M].to(dtype) / context.temperature
            share_M = torch.exp(scaled_M - normaliser_T[token_M])
            gradient_M = (-gradient_T[token_M] * share_M).to(gradient_NV.dtype)
            gradient_NV.index_put_((place_M, id_M), gradient_M, accumulate=True)
        gradient_NV.index_put_((place_T, target_T), gradient_T.to(gradient_NV.dtype), accumulate=True)
        return gradient_NV, None, None, None, None, None


def _normalisers(scaled_M: Tensor, token_M: Tensor, otherwise_T: Tensor) -> Tensor:
    """Return the logarithm of the sum of exponentials of each token's part, ``(T,)``; where it has none, the other."""
    peak_T = torch.full_like(otherwise_T, -torch.inf).scatter_reduce(0, token_M, scaled_M, "amax")
    total_T = torch.zeros_like(otherwise_T).index_add(0, token_M, torch.exp(scaled_M - peak_T[token_M]))
    return torch.where(total_T > 0, peak_T + total_T.log(), otherwise_T)


def _chunks(logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    num_rows = max(1, _CHUNK_ELEMENTS // max(1, logits_NV.shape[1]))
    for start in range(0, len(logits_NV), num_rows):
        yield start, min(start + num_rows, len(logits_NV))
