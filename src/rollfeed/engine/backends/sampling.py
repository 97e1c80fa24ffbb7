"""Sampling of the next tokens, all rows of a step together.

In this order: repetition penalty, tokens that may not come yet, temperature, top-k, then top-p of
what top-k left. The log-probability reported is that of the token in the distribution it was drawn
from, renormalised after top-k and top-p. Temperature 0 takes the most likely token and reports its
log-probability at temperature 1, unrestricted by top-k and top-p.

A draw depends on the row's distribution, its seed and the token's number only: the random number
is a hash of the two, not the next value of a stream. A request that continues an earlier, aborted
one counts its tokens from 0 again, so its caller derives a seed of its own for it.

Axes: M rows of a step, V vocabulary, B blocks of the vocabulary, W tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.types import SamplingParams

_BLOCK_WIDTH = 256
_CANDIDATES = (256, 4096)
"""How many of the likeliest tokens are sorted to find where top-p ends, before all of them are."""

_COLDEST, _HOTTEST = 1e-6, 1e30
"""Temperatures: below the first one samples greedily, above the second nothing changes any more."""
_MOST_PENALTY = 1e20

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


TopTokens = Sequence[tuple[int, float]]
"""The likeliest tokens, from the likeliest on, with their log-probabilities before top-k and top-p."""


class Draws(NamedTuple):
    """One token a row."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finite: NDArray[np.bool_]
    """False where the logits were not numbers; the row's token means nothing then."""
    kept: Sequence[NDArray[np.int32]] = ()
    """What each row's token was drawn from, where a row asks for it; empty for the others."""
    tops: Sequence[TopTokens] = ()
    """The likeliest tokens of each row, where one asks for them."""


def uniforms(seeds_M: NDArray[np.uint64], counters_M: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), with 53 random bits, that depend on seed and counter only.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014), of the seed and then of the counter-th state that follows.
    """
    bits_M = _mixed(_mixed(seeds_M + _GOLDEN) + (counters_M + np.uint64(1)) * _GOLDEN)
    return (bits_M >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


class RowSettings(NamedTuple):
    """Settings that each of the M rows of a step is drawn with."""

    temperature_M: NDArray[np.float32]
    top_k_M: NDArray[np.int64]
    """The vocabulary's size where there is no limit."""
    top_p_M: NDArray[np.float64]
    uniform_M: NDArray[np.float64]
    """In [0, 1)."""

    def of(self, rows: NDArray[np.int64] | slice) -> RowSettings:
        """Return those of some rows."""
        return RowSettings(self.temperature_M[rows], self.top_k_M[rows], self.top_p_M[rows], self.uniform_M[rows])


class Draw(Protocol):
    """Draws one token a row, as the head of this module says."""

    def __call__(self, logits_MV: Tensor, settings: RowSettings) -> Draws:
        """Return the draws; the float32 logits are overwritten."""


class Sampler:
    """Holds how each of a fixed number of rows is sampled, and samples any of them together."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device, draw: Draw | None = None) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._draw = draw or TorchDraw(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._alone = TorchDraw(num_rows=1, vocab_size=vocab_size, device=device, one_row_at_a_time=True)
        self._temperature = np.ones(num_rows, np.float32)
        self._top_k = np.full(num_rows, vocab_size, np.int64)
        self._top_p = np.ones(num_rows, np.float64)
        self._penalty = np.ones(num_rows, np.float32)
        self._min_new_tokens = np.zeros(num_rows, np.int64)
        self._returns_mask = np.zeros(num_rows, np.bool_)
        self._num_tops = np.zeros(num_rows, np.int64)
        self._seeds = np.zeros(num_rows, np.uint64)
        self._stop_ids: list[Tensor] = [torch.empty(0, dtype=torch.long, device=device)] * num_rows
        self._seen: Tensor | None = None

    def assign(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_ids: NDArray[np.int32],
        stop_ids: Iterable[int],
        num_tops: int = 0,
    ) -> None:
        """Say how a row is sampled from now on.

        ``stop_ids`` are held back before ``min_new_tokens``; ``num_tops`` of the likeliest tokens are told.
        """
        # Beyond these nothing changes but that float32 has no number for what is computed with them.
        self._temperature[row] = min(params.temperature, _HOTTEST) if params.temperature >= _COLDEST else 0.0
        self._top_k[row] = self._vocab_size if params.top_k == -1 else min(params.top_k, self._vocab_size)
        self._top_p[row] = params.top_p
        self._penalty[row] = min(max(params.repetition_penalty, 1 / _MOST_PENALTY), _MOST_PENALTY)
        self._min_new_tokens[row] = params.min_new_tokens
        self._returns_mask[row] = params.return_sampling_mask
        self._num_tops[row] = num_tops
        self._seeds[row] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        known = sorted(token_id for token_id in set(stop_ids) if 0 <= token_id < self._vocab_size)
        self._stop_ids[row] = torch.tensor(known, dtype=torch.long, device=self._device)
        if params.repetition_penalty != 1.0:
            if self._seen is None:
                shape = (len(self._penalty), self._vocab_size)
                self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._seen[row] = False
            self._seen[row, torch.as_tensor(prompt_ids.astype(np.int64), device=self._device)] = True

    def sample(self, logits_MV: Tensor, rows: NDArray[np.int64], num_new_tokens: NDArray[np.int64]) -> Draws:
        """Draw one token for each of ``rows`` ``(M,)``; the float32 logits are overwritten.

        Each has sampled ``num_new_tokens`` ``(M,)`` so far.
        """
        self._penalise(logits_MV, rows)
        for index in np.flatnonzero(num_new_tokens < self._min_new_tokens[rows]):
            logits_MV[index, self._stop_ids[rows[index]]] = -torch.inf
        settings = RowSettings(
            temperature_M=self._temperature[rows],
            top_k_M=self._top_k[rows],
            top_p_M=self._top_p[rows],
            uniform_M=uniforms(self._seeds[rows], num_new_tokens.astype(np.uint64)),
        )
        tops = self._likeliest(logits_MV, self._num_tops[rows], settings.temperature_M)
        draws = self._draw_rows(logits_MV, settings, self._returns_mask[rows])._replace(tops=tops)
        if self._seen is not None:
            self._seen[torch.as_tensor(rows, device=self._device), torch.as_tensor(draws.token_ids)] = True
        return draws

    def _likeliest(
        self, logits_MV: Tensor, counts_M: NDArray[np.int64], temperature_M: NDArray[np.float32]
    ) -> Sequence[TopTokens]:
        """Return the likeliest tokens of rows that ask for them, at the row's temperature, or at 1 where that is 0."""
        tops: list[TopTokens] = [()] * (len(counts_M) if counts_M.any() else 0)
        for row in np.flatnonzero(counts_M):
            logprobs_V = (logits_MV[row].double() / float(temperature_M[row] or 1.0)).log_softmax(dim=-1)
            best = logprobs_V.topk(min(int(counts_M[row]), self._vocab_size))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops[row] = [(token_id, logprob) for token_id, logprob in pairs if logprob > -np.inf]
        return tops

    def _draw_rows(self, logits_MV: Tensor, settings: RowSettings, returns_mask_M: NDArray[np.bool_]) -> Draws:
        """Draw; rows that ask for what they were drawn from are drawn apart, so that the others are as without them."""
        if not returns_mask_M.any():
            return self._draw(logits_MV, settings)
        size = len(logits_MV)
        draws = Draws(np.empty(size, np.int64), np.empty(size, np.float32), np.empty(size, np.bool_))
        kept = [np.empty(0, np.int32)] * size
        for draw, rows in (
            (self._draw, np.flatnonzero(~returns_mask_M)),
            (self._alone, np.flatnonzero(returns_mask_M)),
        ):
            if not len(rows):
                continue
            some_MV = logits_MV[torch.as_tensor(rows, device=self._device)]
            own = draw(some_MV, settings.of(rows))
            draws.token_ids[rows], draws.logprobs[rows], draws.finite[rows] = own.token_ids, own.logprobs, own.finite
            if draw is self._alone:
                # What is left out of a row is at minus infinity by now.
                for row, logits_V in zip(rows, some_MV, strict=True):
                    kept[row] = logits_V.isfinite().nonzero()[:, 0].cpu().numpy().astype(np.int32)
        return draws._replace(kept=kept)

    def _penalise(self, logits_MV: Tensor, rows: NDArray[np.int64]) -> None:
        """Divide positive and multiply negative logits of seen tokens by the row's penalty."""
        if self._seen is None:
            return
        for index in np.flatnonzero(self._penalty[rows] != 1.0):
            penalty = float(self._penalty[rows[index]])
            seen = self._seen[rows[index]].nonzero()[:, 0]
            values = logits_MV[index, seen]
            logits_MV[index, seen] = torch.where(values > 0, values / penalty, values * penalty)


class TorchDraw:
    """Draws with torch, on any device."""

    def __init__(
        self, *, num_rows: int, vocab_size: int, device: torch.device, one_row_at_a_time: bool = False
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._one_row_at_a_time = one_row_at_a_time
        # Kept, because fresh memory of this size costs more than the computation in it.
        padded_size = -(-vocab_size // _BLOCK_WIDTH) * _BLOCK_WIDTH
        self._weights_MV = torch.zeros(num_rows, padded_size, device=device)

    def __call__(self, logits_MV: Tensor, settings: RowSettings) -> Draws:
        if not self._one_row_at_a_time:
            return self._draw_together(logits_MV, settings)
        draws = []
        for index in range(len(logits_MV)):
            row = slice(index, index + 1)
            draws.append(self._draw_together(logits_MV[row], settings.of(row)))
        return Draws(
            np.concatenate([each.token_ids for each in draws]),
            np.concatenate([each.logprobs for each in draws]),
            np.concatenate([each.finite for each in draws]),
        )

    def _draw_together(self, logits_MV: Tensor, settings: RowSettings) -> Draws:
        greedy_M = settings.temperature_M == 0.0
        if (settings.temperature_M != 1.0).any():
            divisor_M = self._tensor(np.where(greedy_M, 1.0, settings.temperature_M).astype(np.float32))
            logits_MV.div_(divisor_M[:, None])
        peak_M1 = logits_MV.amax(dim=-1, keepdim=True)
        finite_M1 = torch.isfinite(peak_M1)
        if not bool(finite_M1.all()):
            logits_MV.masked_fill_(~finite_M1, 0.0)
            peak_M1 = torch.where(finite_M1, peak_M1, 0.0)
        logits_MV.sub_(peak_M1)
        limited_M = (settings.top_k_M < self._vocab_size) | (settings.top_p_M < 1.0)
        restricted = np.flatnonzero(limited_M & ~greedy_M)
        if len(restricted):
            self._restrict(logits_MV, restricted, settings)
        token_ids_M, logprobs_M = _draw(
            logits_MV, self._tensor(settings.uniform_M), self._tensor(greedy_M), self._weights_MV[: len(logits_MV)]
        )
        finite_M = finite_M1[:, 0].cpu().numpy()
        return Draws(token_ids_M.cpu().numpy(), logprobs_M.float().cpu().numpy(), finite_M)

    def _restrict(self, logits_MV: Tensor, restricted: NDArray[np.int64], settings: RowSettings) -> None:
        """Put what top-k and top-p leave out at minus infinity, in the restricted rows only."""
        everywhere = len(restricted) == len(logits_MV)
        chosen = slice(None) if everywhere else self._tensor(restricted)
        some_MV = logits_MV[chosen]
        lowest_M = _lowest_kept(
            some_MV, self._tensor(settings.top_k_M[restricted]), self._tensor(settings.top_p_M[restricted])
        )
        some_MV.masked_fill_(some_MV < lowest_M[:, None], -torch.inf)
        if not everywhere:
            logits_MV[chosen] = some_MV

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def _lowest_kept(logits_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor) -> Tensor:
    """Return the lowest logit of each row that top-k and top-p keep; the maximum of each row is 0.

    Tokens as likely as the last one kept are kept too, so that the result does not depend on how
    equal ones are sorted.
    """
    vocab_size = logits_MV.shape[1]
    longest = int(torch.where(top_k_M < vocab_size, top_k_M, 0).max())
    threshold_M, found_M = _thresholds(logits_MV, top_k_M, top_p_M, min(vocab_size, max(_CANDIDATES[0], longest)))
    for candidates in (*_CANDIDATES[1:], vocab_size):
        rest = (~found_M).nonzero()[:, 0]
        if not len(rest):
            break
        width = min(vocab_size, max(candidates, longest))
        threshold_M[rest], found_M[rest] = _thresholds(logits_MV[rest], top_k_M[rest], top_p_M[rest], width)
    return threshold_M


def _thresholds(logits_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the lowest logit kept in each row, and whether ``width`` candidates sufficed to find it."""
    vocab_size = logits_MV.shape[1]
    sorted_MC = logits_MV.topk(width, dim=-1).values
    last_of_k_M1 = sorted_MC.gather(1, (top_k_M - 1).clamp(max=width - 1)[:, None])
    in_top_k_MC = (sorted_MC >= last_of_k_M1) | (top_k_M == vocab_size)[:, None]
    weights_MC = sorted_MC.double().exp().masked_fill_(~in_top_k_MC, 0.0)
    total_M = weights_MC.sum(dim=-1)
    if bool((top_k_M == vocab_size).any()):
        total_M = torch.where(top_k_M == vocab_size, logits_MV.exp().sum(dim=-1, dtype=torch.float64), total_M)
    before_MC = weights_MC.cumsum(dim=-1) - weights_MC
    # A token is kept while the ones before it do not reach top-p; with top-p 1 all of top-k is.
    kept_MC = in_top_k_MC & ((before_MC < (top_p_M * total_M)[:, None]) | (top_p_M == 1.0)[:, None])
    num_kept_M = kept_MC.sum(dim=-1)
    threshold_M = sorted_MC.gather(1, (num_kept_M - 1).clamp(min=0)[:, None])[:, 0]
    return threshold_M, (num_kept_M < width) | (top_k_M <= width)


def _draw(logits_MV: Tensor, uniform_M: Tensor, greedy_M: Tensor, weights_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids and float64 log-probabilities; the maximum of each row of logits is 0.

    ``weights_MV`` is overwritten. It is the vocabulary rounded up to whole blocks, and 0 beyond it.

    Inverts the cumulative distribution in two steps, first over blocks of the vocabulary, then
    within the block, so that only sums over all of it are needed. A token of probability 0 is never
    the first whose cumulative sum exceeds the target, and is skipped where rounding makes the
    target reach the end.
    """
    num_rows, vocab_size = logits_MV.shape
    torch.exp(logits_MV, out=weights_MV[:, :vocab_size])
    weights_MBW = weights_MV.view(num_rows, -1, _BLOCK_WIDTH)
    sums_MB = weights_MBW.sum(dim=-1, dtype=torch.float64)
    total_M1 = sums_MB.cumsum(dim=-1)[:, -1:]
    block_M1, rest_M1 = _invert(sums_MB, uniform_M[:, None] * total_M1)
    block_weights_MW = weights_MBW[torch.arange(num_rows, device=logits_MV.device), block_M1[:, 0]].double()
    within_M1, _ = _invert(block_weights_MW, rest_M1)
    token_ids_M1 = block_M1 * _BLOCK_WIDTH + within_M1
    if bool(greedy_M.any()):
        token_ids_M1 = torch.where(greedy_M[:, None], logits_MV.argmax(dim=-1, keepdim=True), token_ids_M1)
    logprobs_M1 = logits_MV.gather(1, token_ids_M1).double() - total_M1.log()
    return token_ids_M1[:, 0], logprobs_M1[:, 0]


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the cumulative sums of each row first exceed the target, and what is left of it there."""
    cumulative = weights.cumsum(dim=-1)
    positions = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, positions, 0).amax(dim=-1, keepdim=True)
    index = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return index, target - (cumulative - weights).gather(1, index)
