"""Steps of a model computed with torch: on a GPU, and on CPUs without the native kernels.

In deterministic mode the shapes a request meets depend on its own tokens only: prompts are
prefilled alone in chunks that start at multiples of a fixed size, decoding computes all slots every
time and each attends alone, and a prefix is reused only if a prefill of exactly the same prompt
left it. Row independence of the matrix products is what :mod:`kernels` provides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.batching import Runner
from rollfeed.engine.backends.pytorch.kernels import RowKernels, choose_fixed_kernels
from rollfeed.engine.backends.pytorch.model import DecodeRows, KeyValues, Pass, Segment, TorchModel, TorchWeights
from rollfeed.engine.backends.sampling import Sampler, TorchDraw
from rollfeed.engine.backends.slots import Slots

_ALONE_COST_TOKENS = 128
"""What one more separate attention costs, in positions attended to together with others (CPU)."""


class TorchRunner(Runner):
    """Computes with torch."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        threads: int,
        num_slots: int,
        context_length: int,
        deterministic: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        torch.set_num_threads(threads)
        self.threads = threads
        self.whole_chunks = deterministic
        self._architecture = architecture
        self._num_slots = num_slots
        self._context_length = context_length
        self._device = device
        self._dtype = dtype
        self._weights = TorchWeights(architecture, device=device, dtype=dtype)
        self._cache = KeyValues.empty(
            architecture, num_slots=num_slots, capacity=context_length, device=device, dtype=dtype
        )
        self.slots = Slots(self._cache, num_slots=num_slots, capacity=context_length, whole_prompts_only=deterministic)
        vocab_size = architecture.vocab_size
        draw = TorchDraw(num_rows=num_slots, vocab_size=vocab_size, device=device, one_row_at_a_time=deterministic)
        self.sampler = Sampler(num_rows=num_slots, vocab_size=vocab_size, device=device, draw=draw)
        self._model: TorchModel | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes

    def load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        self._weights.load(tensors, complete=complete)

    def weight(self, name: str) -> Tensor | None:
        return self._weights.by_name.get(name)

    def compute(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.whole_chunks:
            return self._compute_fixed(prefills, decoding)
        return self._compute_together(prefills, decoding)

    def logits(self, hidden_R: Tensor) -> Tensor:
        return self._loaded.logits(hidden_R)

    @property
    def _loaded(self) -> TorchModel:
        """The model; made when its weights are there, because choosing kernels tries them."""
        if self._model is None:
            kernels = RowKernels()
            if self.whole_chunks:
                kernels = choose_fixed_kernels(self._weights.matrices, self._architecture, num_rows=self._num_slots)
            self._model = TorchModel(
                self._architecture, self._weights, kernels=kernels, context_length=self._context_length
            )
        return self._model

    def _compute_together(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one pass over all rows."""
        spans = [(slot, self.slots.num_computed(slot), 1) for slot in decoding]
        decode = self._decode_rows(decoding)
        segments = [] if decode is not None else _segments(spans, first_row=0)
        prefill_spans = [(slot, self.slots.num_computed(slot), count) for slot, count in prefills]
        segments += _segments(prefill_spans, first_row=len(decoding))
        hidden_R = self._loaded.forward(self._pass([*spans, *prefill_spans], decode, segments), self._cache)
        return self._loaded.logits(hidden_R[: len(decoding)]), hidden_R[len(decoding) :]

    def _compute_fixed(self, prefills: Sequence[tuple[int, int]], decoding: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one pass a prompt and one over all slots."""
        prefilled = []
        for slot, count in prefills:
            spans = [(slot, self.slots.num_computed(slot), count)]
            prefilled.append(self._loaded.forward(self._pass(spans, None, _segments(spans, first_row=0)), self._cache))
        hidden_R = torch.cat(prefilled) if prefilled else torch.empty(0, self._architecture.hidden_size)
        token_ids_N, positions_N = np.zeros(self._num_slots, np.int64), np.zeros(self._num_slots, np.int64)
        segments = []
        for slot in decoding:
            position = self.slots.num_computed(slot)
            positions_N[slot] = position
            token_ids_N[slot] = self.slots.token_ids(slot, position, position + 1)[0]
            segments.append(Segment(start=slot, end=slot + 1, slot=slot, length=position + 1))
        rows = self._tensor(np.array(decoding, np.int64))
        if not decoding:
            return torch.empty(0, self._architecture.vocab_size), hidden_R
        step = Pass(
            token_ids=self._tensor(token_ids_N),
            positions=self._tensor(positions_N),
            written_rows=rows,
            written_slots=rows,
            written_positions=self._tensor(positions_N)[rows],
            decode=None,
            segments=segments,
        )
        return self._loaded.logits(self._loaded.forward(step, self._cache))[rows], hidden_R

    def _pass(
        self, spans: Sequence[tuple[int, int, int]], decode: DecodeRows | None, segments: Sequence[Segment]
    ) -> Pass:
        """Build a pass over spans of (slot, first position, number of tokens)."""
        token_ids = [self.slots.token_ids(slot, start, start + count) for slot, start, count in spans]
        positions = self._tensor(np.concatenate([np.arange(start, start + count) for _, start, count in spans]))
        return Pass(
            token_ids=self._tensor(np.concatenate(token_ids).astype(np.int64)),
            positions=positions,
            written_rows=None,
            written_slots=self._tensor(np.repeat([slot for slot, _, _ in spans], [count for _, _, count in spans])),
            written_positions=positions,
            decode=decode,
            segments=segments,
        )

    def _decode_rows(self, decoding: Sequence[int]) -> DecodeRows | None:
        """Return how the slots attend together, or None when each alone is cheaper.

        Together, every slot up to the highest costs as much as the longest.
        """
        if not decoding:
            return None
        num_slots = decoding[-1] + 1
        lengths_N = np.ones(num_slots, np.int64)
        lengths_N[decoding] = [self.slots.num_computed(slot) + 1 for slot in decoding]
        length = int(lengths_N.max())
        alone = int(lengths_N[decoding].sum()) + _ALONE_COST_TOKENS * len(decoding)
        if self._device.type == "cpu" and alone < num_slots * length:
            return None
        hidden_NS = np.arange(length) >= lengths_N[:, None]
        mask_NS = np.where(hidden_NS, np.float32(-np.inf), np.float32(0.0))
        return DecodeRows(
            slots=self._tensor(np.array(decoding, np.int64)),
            fills_slots=len(decoding) == num_slots,
            num_slots=num_slots,
            length=length,
            mask=self._tensor(mask_NS)[:, None, None, :].to(self._dtype),
        )

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _segments(spans: Sequence[tuple[int, int, int]], *, first_row: int) -> list[Segment]:
    """Return the rows of spans of (slot, first position, number of tokens), one after the other."""
    segments = []
    for slot, start, count in spans:
        segments.append(Segment(start=first_row, end=first_row + count, slot=slot, length=start + count))
        first_row += count
    return segments
