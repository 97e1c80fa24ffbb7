"""Numbers that describe an update, gathered from its micro-batches, and what they took.

Axes: T trained tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Tally:
    """Sums and extremes over trained tokens; order of micro-batches and their sizes do not matter."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lowest: dict[str, float] = {}
        self._highest: dict[str, float] = {}

    def add(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Add the values of trained tokens to the sum of this name; what is not trained on does not count."""
        trained_T = values_T.detach()[mask_T != 0]
        self._sums[name] = self._sums.get(name, 0.0) + float(trained_T.double().sum())

    def add_extremes(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Keep the lowest and the highest value of a trained token."""
        trained_T = values_T.detach()[mask_T != 0]
        if len(trained_T):
            low, high = torch.aminmax(trained_T)
            self._lowest[name] = min(self._lowest.get(name, math.inf), float(low))
            self._highest[name] = max(self._highest.get(name, -math.inf), float(high))

    def count(self, mask_T: Tensor) -> None:
        """Count trained tokens: what the sums are divided by."""
        self._sums["tokens"] = self._sums.get("tokens", 0.0) + float(torch.count_nonzero(mask_T))

    def merge(self, other: Tally) -> None:
        """Take what another one gathered."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
        for name, value in other._lowest.items():
            self._lowest[name] = min(self._lowest.get(name, math.inf), value)
        for name, value in other._highest.items():
            self._highest[name] = max(self._highest.get(name, -math.inf), value)

    def metrics(self, *, prefix: str) -> dict[str, float]:
        """Return means over trained tokens, and ``_min`` and ``_max`` of what has extremes; nothing without tokens."""
        tokens = self._sums.get("tokens", 0.0)
        if tokens == 0:
            return {}
        means = {f"{prefix}{name}": total / tokens for name, total in self._sums.items() if name != "tokens"}
        lowest = {f"{prefix}{name}_min": value for name, value in self._lowest.items()}
        highest = {f"{prefix}{name}_max": value for name, value in self._highest.items()}
        return {f"{prefix}tokens": tokens, **means, **lowest, **highest}


def add_mismatch(tally: Tally, *, trainer_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor) -> None:
    """Tally how far the trainer's policy is from the engine's, at tokens that the engine sampled.

    ``mismatch_kl`` estimates KL(engine || trainer) by k3, ``mismatch_k1`` by the log-ratio (Schulman, "Approximating KL
    Divergence", 2020); ``mismatch_abs`` are absolute differences of log-probabilities, and ``mismatch_ratio`` the
    trainer's over the engine's probability.
    """
    with torch.no_grad():
        log_ratio_T = trainer_logprobs_T.double() - rollout_logprobs_T.double()
        tally.add("mismatch_k1", -log_ratio_T, mask_T)
        tally.add("mismatch_kl", torch.expm1(log_ratio_T) - log_ratio_T, mask_T)
        tally.add("mismatch_abs", log_ratio_T.abs(), mask_T)
        tally.add_extremes("mismatch_abs", log_ratio_T.abs(), mask_T)
        tally.add_extremes("mismatch_ratio", torch.exp(log_ratio_T), mask_T)


class Stopwatch:
    """Adds up how long the parts of a step take."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began
