"""Numbers that describe an update, gathered from its micro-batches, and what they took.

Axes: T trained tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Tally:
    """Sums and extremes over trained tokens; order of micro-batches and their sizes do not matter.

    They stay on the device of what is added, where they are added up; only :meth:`metrics` waits for them.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._lowest: dict[str, Tensor] = {}
        self._highest: dict[str, Tensor] = {}

    def add(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Add the values of trained tokens to the sum of this name; what is not trained on does not count."""
        trained_T = torch.where(mask_T != 0, values_T.detach(), 0.0)
        _merge(self._sums, name, trained_T.double().sum(), torch.add)

    def add_extremes(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Keep the lowest and the highest value of a trained token."""
        trained_T, values_T = mask_T != 0, values_T.detach().double()
        if len(values_T):
            _merge(self._lowest, name, torch.where(trained_T, values_T, math.inf).amin(), torch.minimum)
            _merge(self._highest, name, torch.where(trained_T, values_T, -math.inf).amax(), torch.maximum)

    def count(self, mask_T: Tensor, *, name: str = "tokens") -> None:
        """Count trained tokens; ``tokens`` are what the sums are divided by."""
        _merge(self._counts, name, (mask_T != 0).double().sum(), torch.add)

    def merge(self, other: Tally) -> None:
        """Take what another one gathered."""
        for own, others, join in (
            (self._counts, other._counts, torch.add),
            (self._sums, other._sums, torch.add),
            (self._lowest, other._lowest, torch.minimum),
            (self._highest, other._highest, torch.maximum),
        ):
            for name, value in others.items():
                _merge(own, name, value, join)

    def metrics(self) -> dict[str, float]:
        """Return means over trained tokens, and ``_min`` and ``_max`` of what has extremes; nothing without tokens."""
        lowest = {f"{name}_min": value for name, value in self._lowest.items()}
        highest = {f"{name}_max": value for name, value in self._highest.items()}
        gathered = {**self._counts, **self._sums, **lowest, **highest}
        read = dict(zip(gathered, torch.stack(list(gathered.values())).tolist(), strict=True)) if gathered else {}
        tokens = read.get("tokens", 0.0)
        if tokens == 0:
            return {}
        return {name: value / tokens if name in self._sums else value for name, value in read.items()}


def _merge(gathered: dict[str, Tensor], name: str, value: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> None:
    gathered[name] = join(gathered[name], value) if name in gathered else value


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
