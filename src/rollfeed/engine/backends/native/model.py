"""A decoder whose weights, keys and values live in the native library.

Axes: R rows (tokens of a pass), M rows that are sampled, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint8
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.engine.backends.architecture import Architecture, rotary_tables
from rollfeed.engine.backends.native.library import Sizes, load_library
from rollfeed.engine.backends.sampling import Draws, RowSettings
from rollfeed.errors import EngineError

_GROUP = 32
"""The smallest group of inputs that has a scale of its own."""
_PARTS = (
    "norms",
    "quantisation",
    "qkv_projection",
    "rotation_and_cache",
    "attention",
    "output_projection",
    "gate_up_projection",
    "activation",
    "down_projection",
    "head",
    "sampling",
)
"""Of a step, in the order of csrc/model.h."""


class NativeModel:
    """Owns the library's memory; :meth:`close` frees it."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        num_slots: int,
        capacity: int,
        max_rows: int,
        max_threads: int,
        quantised: bool = False,
    ) -> None:
        """Make a model whose weights are still to be written.

        Keys and values are held for ``num_slots`` requests of ``capacity`` tokens, a multiple of 16. ``max_threads``
        includes this one; ``quantised`` holds weights and activations in 8 bits, see :func:`quantised_refusal`.

        Raises:
            EngineError: If there is not enough memory.
        """
        self._library = load_library()
        sizes = Sizes(
            **{
                name: getattr(architecture, name)
                for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
            },
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            rms_norm_eps=architecture.rms_norm_eps,
            num_slots=num_slots,
            capacity=capacity,
            max_rows=max_rows,
            quantised=quantised,
        )
        self.handle = self._library.rf_model_new(ctypes.byref(sizes), max_threads)
        if not self.handle:
            raise EngineError("not enough memory for the model: lower engine.num_slots or engine.context_length")
        self._vocab_size = architecture.vocab_size
        self._hidden_size = architecture.hidden_size
        self._max_rows = max_rows
        self._logits_stride = self._library.rf_logits_stride(self.handle)
        self._logits_RV = torch.empty(max_rows, self._logits_stride)
        tables = rotary_tables(architecture.rope, head_dim=architecture.head_dim, context_length=capacity)
        for sines, table in zip((False, True), tables, strict=True):
            self.array(self._library.rf_model_rotary(self.handle, sines), *table.shape)[:] = table.numpy()

    def close(self) -> None:
        """Free the memory and end the threads."""
        self._library.rf_model_free(self.handle)
        self.handle = None

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads from now on, at most as many as the model was made for."""
        if not self._library.rf_model_set_threads(self.handle, threads):
            raise EngineError(f"the system does not give {threads} threads")

    @staticmethod
    def array(pointer: Any, *shape: int) -> NDArray[np.float32]:
        """Return memory of the library as an array; valid until :meth:`close`."""
        return np.ctypeslib.as_array(pointer, shape)

    def forward(
        self, token_ids_R: NDArray[np.int32], positions_R: NDArray[np.int32], slots_R: NDArray[np.int32]
    ) -> Tensor:
        """Write the rows' keys and values; return hidden states before the last norm, ``(R, hidden)``.

        A row attends to what its slot holds up to its own position, rows of this pass included.
        """
        hidden_R = torch.empty(len(token_ids_R), self._hidden_size)
        for start in range(0, len(token_ids_R), self._max_rows):
            rows = slice(start, start + self._max_rows)
            self._library.rf_forward(
                self.handle,
                len(token_ids_R[rows]),
                *(_ints(values_R[rows]) for values_R in (token_ids_R, positions_R, slots_R)),
                _floats(hidden_R[rows]),
            )
        return hidden_R

    def logits(self, hidden_R: Tensor) -> Tensor:
        """Return float32 logits ``(R, vocabulary)``, a view of wider rows; valid until the next call."""
        hidden_R = hidden_R.contiguous()
        num_rows = len(hidden_R)
        # Kept, because fresh memory of this size costs more than it should.
        logits_RV = self._logits_RV if num_rows <= self._max_rows else torch.empty(num_rows, self._logits_stride)
        for start in range(0, num_rows, self._max_rows):
            rows = slice(start, min(start + self._max_rows, num_rows))
            self._library.rf_logits(self.handle, len(hidden_R[rows]), _floats(hidden_R[rows]), _floats(logits_RV[rows]))
        return logits_RV[:num_rows, : self._vocab_size]

    def draw(self, logits_MV: Tensor, settings: RowSettings) -> Draws:
        """Draw one token a row; see :class:`rollfeed.engine.backends.sampling.Draw`."""
        num_rows = len(logits_MV)
        draws = Draws(np.empty(num_rows, np.int64), np.empty(num_rows, np.float32), np.empty(num_rows, np.bool_))
        self._library.rf_sample(
            self.handle,
            num_rows,
            _floats(logits_MV),
            logits_MV.stride(0),
            _pointer(settings.temperature_M, np.float32, c_float),
            _pointer(settings.top_k_M, np.int64, c_int64),
            _pointer(settings.top_p_M, np.float64, c_double),
            _pointer(settings.uniform_M, np.float64, c_double),
            _pointer(draws.token_ids, np.int64, c_int64),
            _pointer(draws.logprobs, np.float32, c_float),
            _pointer(draws.finite, np.bool_, c_uint8),
        )
        return draws

    def copy_positions(self, donor: int, slot: int, start: int, end: int) -> None:
        self._library.rf_copy_positions(self.handle, donor, slot, start, end)

    def erase(self, slot: int) -> None:
        self._library.rf_erase_slot(self.handle, slot)

    def take_milliseconds(self) -> Mapping[str, float]:
        """Return the time spent in each part since the last call."""
        nanoseconds = np.ctypeslib.as_array(self._library.rf_model_nanoseconds(self.handle), (len(_PARTS),))
        taken = {part: value / 1e6 for part, value in zip(_PARTS, nanoseconds.tolist(), strict=True)}
        nanoseconds[:] = 0
        return taken


def quantised_refusal(architecture: Architecture) -> str | None:
    """Return why a model cannot be held in 8 bits, or None when it can."""
    widths = (architecture.hidden_size, architecture.query_size, architecture.intermediate_size)
    odd = [width for width in widths if width % _GROUP]
    return f"a layer has {odd[0]} inputs, which is not a multiple of {_GROUP}" if odd else None


def _floats(tensor: Tensor) -> Any:
    assert tensor.dtype == torch.float32
    assert tensor.stride(-1) == 1
    return ctypes.cast(tensor.data_ptr(), POINTER(c_float))


def _ints(values: NDArray[np.int32]) -> Any:
    return _pointer(values, np.int32, c_int32)


def _pointer(values: NDArray[Any], dtype: Any, kind: Any) -> Any:
    assert values.dtype == dtype
    assert values.flags.c_contiguous
    return values.ctypes.data_as(POINTER(kind))
