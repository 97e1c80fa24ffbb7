"""Places of a checkpoint's weights in a native model, by their Hugging Face names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_float
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.native.library import load_library
from rollfeed.engine.backends.native.model import NativeModel
from rollfeed.engine.backends.replacement import as_tensor, check_replacement, writing

_QKV, _OUTPUT, _GATE_UP, _DOWN = range(4)
_ATTENTION_NORM, _MLP_NORM, _QUERY_NORM, _KEY_NORM = range(4)
_WHOLE_MODEL = -1
_MOST_CODE = 63.0
"""As in csrc/quantised.h."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightPlace:
    """Of one weight: float32 tensors of ``shape`` go in and come out."""

    shape: tuple[int, ...]
    write: Callable[[Tensor], None]
    read: Callable[[], Tensor]


class NativeWeights:
    """Writes checkpoint tensors into a native model, and reads them back."""

    def __init__(self, model: NativeModel, architecture: Architecture) -> None:
        self._library = load_library()
        self._model = model
        self._places: dict[str, _WeightPlace] = {}
        for layer in range(architecture.num_layers):
            self._add_layer(architecture, layer)
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        self._places["model.norm.weight"] = self._norm(_WHOLE_MODEL, 0, hidden)
        head = self._rows(_WHOLE_MODEL, 0, 0, vocab, hidden)
        embedding = self._vector(self._library.rf_model_embedding(model.handle), vocab, hidden)
        self._ties = {}
        if architecture.tied_head:
            head = embedding = _both(embedding, head)
            self._ties[_HEAD] = _EMBEDDING
        self._places |= {_EMBEDDING: embedding, _HEAD: head}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: place.shape for name, place in self._places.items()}

    def load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        """Replace the named weights in place, all of them or none; see :func:`check_replacement`."""
        ties = {name: self._ties.get(name, name) for name in self._places}
        chosen = check_replacement(self.shapes, ties, tensors, complete=complete, dtype=torch.float32)
        with writing():
            for name in chosen:
                self._places[name].write(as_tensor(name, tensors[name]).to("cpu", torch.float32).contiguous())

    def read(self, name: str) -> Tensor | None:
        """Return a copy of a weight; None if there is none of this name."""
        place = self._places.get(name)
        return None if place is None else place.read()

    def _add_layer(self, sizes: Architecture, layer: int) -> None:
        prefix, hidden, inner = f"model.layers.{layer}", sizes.hidden_size, sizes.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = (("q_proj", sizes.query_size), ("k_proj", sizes.kv_size), ("v_proj", sizes.kv_size))
        groups: list[tuple[str, int, tuple[tuple[str, int], ...], int, bool]] = [
            (attention, _QKV, qkv, hidden, sizes.qkv_bias),
            (attention, _OUTPUT, (("o_proj", hidden),), sizes.query_size, sizes.output_bias),
            (mlp, _GATE_UP, (("gate_proj", inner), ("up_proj", inner)), hidden, sizes.mlp_bias),
            (mlp, _DOWN, (("down_proj", hidden),), inner, sizes.mlp_bias),
        ]
        for part, matrix, members, num_inputs, has_bias in groups:
            first = 0
            for name, num_rows in members:
                self._places[f"{part}.{name}.weight"] = self._rows(layer, matrix, first, num_rows, num_inputs)
                if has_bias:
                    self._places[f"{part}.{name}.bias"] = self._bias(layer, matrix, first, num_rows)
                first += num_rows
        norms = {
            f"{prefix}.input_layernorm.weight": (_ATTENTION_NORM, hidden),
            f"{prefix}.post_attention_layernorm.weight": (_MLP_NORM, hidden),
        }
        if sizes.query_key_norm:
            norms[f"{attention}.q_norm.weight"] = (_QUERY_NORM, sizes.head_dim)
            norms[f"{attention}.k_norm.weight"] = (_KEY_NORM, sizes.head_dim)
        self._places |= {name: self._norm(layer, which, size) for name, (which, size) in norms.items()}

    def _rows(self, layer: int, matrix: int, first: int, num_rows: int, num_inputs: int) -> _WeightPlace:
        handle = self._library.rf_model_matrix(self._model.handle, layer, matrix)

        def write(rows: Tensor) -> None:
            self._library.rf_matrix_write(handle, first, num_rows, _pointer(rows))

        def read() -> Tensor:
            rows = torch.empty(num_rows, num_inputs)
            self._library.rf_matrix_read(handle, first, num_rows, _pointer(rows))
            return rows

        return _WeightPlace(shape=(num_rows, num_inputs), write=write, read=read)

    def _bias(self, layer: int, matrix: int, first: int, num_rows: int) -> _WeightPlace:
        handle = self._library.rf_model_matrix(self._model.handle, layer, matrix)
        whole = NativeModel.array(self._library.rf_matrix_bias(handle), first + num_rows)
        return _in_array(whole[first:])

    def _norm(self, layer: int, which: int, size: int) -> _WeightPlace:
        return self._vector(self._library.rf_model_norm(self._model.handle, layer, which, size), size)

    @staticmethod
    def _vector(pointer: Any, *shape: int) -> _WeightPlace:
        return _in_array(NativeModel.array(pointer, *shape))


def quantised(weight: Tensor) -> Tensor:
    """Return a matrix as it is held in 8 bits: a scale for each group of inputs of a row, and codes of -63 to 63."""
    num_rows, num_inputs = weight.shape
    groups = weight.reshape(num_rows, -1, 64 if num_inputs % 64 == 0 else 32)
    most = groups.abs().amax(dim=-1, keepdim=True)
    codes = torch.where(most > 0, groups * (_MOST_CODE / most), 0.0).round()
    return (codes * (most / _MOST_CODE)).reshape(num_rows, num_inputs)


def _in_array(array: np.ndarray[Any, np.dtype[np.float32]]) -> _WeightPlace:
    view = torch.from_numpy(array)

    def write(values: Tensor) -> None:
        view.copy_(values)

    return _WeightPlace(shape=tuple(array.shape), write=write, read=view.clone)


def _both(first: _WeightPlace, second: _WeightPlace) -> _WeightPlace:
    def write(values: Tensor) -> None:
        first.write(values)
        second.write(values)

    return _WeightPlace(shape=first.shape, write=write, read=first.read)


def _pointer(tensor: Tensor) -> Any:
    return ctypes.cast(tensor.data_ptr(), POINTER(c_float))
