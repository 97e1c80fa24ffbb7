"""Steps of a model computed by the native kernels, on the CPU, in float32 or with 8-bit products.

A row's bits depend on its own tokens only, whatever else a step computes and however a prompt is
cut into chunks. So this is deterministic by construction, at full speed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.batching import Runner
from rollfeed.engine.backends.native.model import NativeModel
from rollfeed.engine.backends.native.places import NativeWeights
from rollfeed.engine.backends.sampling import Sampler
from rollfeed.engine.backends.slots import Slots

logger = logging.getLogger(__name__)

_BLOCK = 16
"""Positions of a block of keys."""
_WORTH_A_THREAD = 0.9
"""More threads are taken when a step then takes less than this share of the time."""


class NativeRunner(NativeModel, Runner):
    """Computes with the native kernels; see :class:`rollfeed.engine.backends.batching.Runner`."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        threads: int,
        max_threads: int,
        num_slots: int,
        context_length: int,
        max_prefill: int,
        quantised: bool,
    ) -> None:
        """Take memory; the weights are still to be loaded.

        ``threads`` of 0 chooses among up to ``max_threads`` by measurement, when the weights have been loaded.
        """
        self.threads = threads
        self._max_threads = threads or max_threads
        super().__init__(
            architecture,
            num_slots=num_slots,
            capacity=-(-context_length // _BLOCK) * _BLOCK,
            max_rows=num_slots + max_prefill,
            max_threads=self._max_threads,
            quantised=quantised,
        )
        self._weights = NativeWeights(self, architecture)
        self.slots = Slots(self, num_slots=num_slots, capacity=context_length)
        self.sampler = Sampler(
            num_rows=num_slots, vocab_size=architecture.vocab_size, device=torch.device("cpu"), draw=self.draw
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes

    def load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        self._weights.load(tensors, complete=complete)
        if not self.threads:
            self.threads = self._fastest_threads()
            self.set_threads(self.threads)

    def weight(self, name: str) -> Tensor | None:
        return self._weights.read(name)

    def compute(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> tuple[Tensor, Tensor]:
        spans = [*((slot, 1) for slot in decoding), *prefills]
        starts = [self.slots.num_computed(slot) for slot, _ in spans]
        ends = [start + count for start, (_, count) in zip(starts, spans, strict=True)]
        bounds = list(zip(spans, starts, ends, strict=True))
        hidden_R = self.forward(
            np.concatenate([self.slots.token_ids(slot, start, end) for (slot, _), start, end in bounds]),
            np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in bounds]),
            np.repeat(np.array([slot for slot, _ in spans], np.int32), [count for _, count in spans]),
        )
        return self.logits(hidden_R[: len(decoding)]), hidden_R[len(decoding) :]

    def _fastest_threads(self) -> int:
        """Time a step of all slots with 1, 2, 4... threads; stop where more bring little."""
        best, best_seconds = 0, float("inf")
        counts = [2**power for power in range(self._max_threads.bit_length()) if 2**power < self._max_threads]
        for count in (*counts, self._max_threads):
            self.set_threads(count)
            seconds = min(self._step_seconds() for _ in range(2))
            if seconds > _WORTH_A_THREAD * best_seconds:
                break
            best, best_seconds = count, seconds
        logger.info("%d of %d threads: a step of all slots takes %.0f ms", best, self._max_threads, 1e3 * best_seconds)
        return best

    def _step_seconds(self) -> float:
        # Position 0 of every slot is written; nothing is known to be there yet.
        zeros = np.zeros(self.slots.num_slots, np.int32)
        started = time.perf_counter()
        self.logits(self.forward(zeros, zeros, np.arange(self.slots.num_slots, dtype=np.int32)))
        return time.perf_counter() - started
