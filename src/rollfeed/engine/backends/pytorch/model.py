"""The forward pass of Llama-like decoders: Llama, Mistral, Qwen2, Qwen3.

One pass takes rows of two sorts. *Decode rows* are the newest token of a request each and are
computed together; *segments* are runs of tokens of one slot, such as a chunk of a prompt.

Axes: R rows (tokens of this step), N slots looked at together, T rows of a segment, S positions
attended to, K key/value heads, G query heads that share one, J = T * G, D head dimension. Keys and values are
never repeated for the query heads that share them: those heads are more rows of one product. Query, key and value
weights lie in one matrix, gate and up weights in another.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rollfeed.engine.backends.architecture import Architecture, rotary_tables
from rollfeed.engine.backends.pytorch.kernels import RowKernels
from rollfeed.engine.backends.replacement import replace_in_place

_ALIGNED_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class TorchWeights:
    """Storage for all weights, fused; uninitialised until :meth:`load` has been given a whole checkpoint."""

    def __init__(self, architecture: Architecture, *, device: torch.device, dtype: torch.dtype) -> None:
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.by_name: dict[str, Tensor] = {}
        """Views into the fused storage, by Hugging Face name; tied names share one."""
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        self.embedding = self._add("model.embed_tokens.weight", vocab, hidden)
        self.layers = [self._layer(architecture, f"model.layers.{index}") for index in range(architecture.num_layers)]
        self.norm = self._add("model.norm.weight", hidden)
        if architecture.tied_head:
            self.head = self.by_name["lm_head.weight"] = self.embedding
        else:
            self.head = self._add("lm_head.weight", vocab, hidden)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.by_name.items()}

    @property
    def matrices(self) -> Sequence[Tensor]:
        """One of each shape that rows are multiplied by."""
        layer = self.layers[0]
        return (layer.qkv, layer.output, layer.gate_up, layer.down, self.head)

    def _add(self, name: str, *shape: int) -> Tensor:
        self.by_name[name] = torch.empty(shape, **self._options)
        return self.by_name[name]

    def _fused(self, parts: Sequence[tuple[str, int]], suffix: str, *columns: int) -> Tensor:
        whole = torch.empty((sum(rows for _, rows in parts), *columns), **self._options)
        views = torch.split(whole, [rows for _, rows in parts])
        self.by_name.update({f"{name}.{suffix}": view for (name, _), view in zip(parts, views, strict=True)})
        return whole

    def _layer(self, sizes: Architecture, prefix: str) -> LayerWeights:
        hidden = sizes.hidden_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [
            (f"{attention}.q_proj", sizes.query_size),
            (f"{attention}.k_proj", sizes.kv_size),
            (f"{attention}.v_proj", sizes.kv_size),
        ]
        gate_up = [(f"{mlp}.gate_proj", sizes.intermediate_size), (f"{mlp}.up_proj", sizes.intermediate_size)]
        norms = sizes.query_key_norm
        return LayerWeights(
            attention_norm=self._add(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(qkv, "weight", hidden),
            qkv_bias=self._fused(qkv, "bias") if sizes.qkv_bias else None,
            query_norm=self._add(f"{attention}.q_norm.weight", sizes.head_dim) if norms else None,
            key_norm=self._add(f"{attention}.k_norm.weight", sizes.head_dim) if norms else None,
            output=self._add(f"{attention}.o_proj.weight", hidden, sizes.query_size),
            output_bias=self._add(f"{attention}.o_proj.bias", hidden) if sizes.output_bias else None,
            mlp_norm=self._add(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused(gate_up, "weight", hidden),
            gate_up_bias=self._fused(gate_up, "bias") if sizes.mlp_bias else None,
            down=self._add(f"{mlp}.down_proj.weight", hidden, sizes.intermediate_size),
            down_bias=self._add(f"{mlp}.down_proj.bias", hidden) if sizes.mlp_bias else None,
        )

    def load(self, tensors: Mapping[str, Any], *, complete: bool = False) -> None:
        """Replace the named weights in place, all of them or none; see :func:`replace_in_place`."""
        replace_in_place(self.by_name, tensors, complete=complete)


@dataclass(slots=True, kw_only=True)
class KeyValues:
    """Keys and values of all slots, ``(layers, slots, K, capacity, D)`` each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(
        cls, architecture: Architecture, *, num_slots: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> KeyValues:
        """Return zeros that hold ``capacity`` tokens a slot."""
        # Every slot begins at a multiple of 64 bytes: the alignment changes the last bits of a product (MKL).
        length = -(-capacity // _ALIGNED_TOKENS) * _ALIGNED_TOKENS
        shape = (architecture.num_layers, num_slots, architecture.num_kv_heads, length, architecture.head_dim)
        return cls(keys=_lazy_zeros(shape, device, dtype), values=_lazy_zeros(shape, device, dtype))

    def copy_positions(self, donor: int, slot: int, start: int, end: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, slot, :, start:end] = tensor[:, donor, :, start:end]

    def erase(self, slot: int) -> None:
        self.keys[:, slot] = 0.0
        self.values[:, slot] = 0.0


@dataclass(slots=True, kw_only=True)
class DecodeRows:
    """The first rows of a pass, attending together to the first N slots."""

    slots: Tensor
    """The slot of each of these rows. ``(rows,)``."""
    fills_slots: bool
    """Whether the rows are exactly slots 0 to N - 1, in order."""
    num_slots: int
    length: int
    """S: positions of the longest of them."""
    mask: Tensor
    """0 where a slot holds a key, minus infinity elsewhere. ``(N, 1, 1, S)``."""


@dataclass(slots=True, kw_only=True)
class Segment:
    """Rows ``start`` to ``end`` of a pass: consecutive positions of one slot, up to ``length``."""

    start: int
    end: int
    slot: int
    length: int


@dataclass(slots=True, kw_only=True)
class Pass:
    """Rows of one forward pass."""

    token_ids: Tensor
    """``(R,)``."""
    positions: Tensor
    """``(R,)``."""
    written_rows: Tensor | None
    """Rows whose keys and values are kept; None for all."""
    written_slots: Tensor
    """The slot of each of those rows."""
    written_positions: Tensor
    decode: DecodeRows | None
    segments: Sequence[Segment] = field(default_factory=tuple)


class TorchModel:
    """A decoder over :class:`TorchWeights`; holds no state of any request."""

    def __init__(
        self, architecture: Architecture, weights: TorchWeights, *, kernels: RowKernels, context_length: int
    ) -> None:
        self.architecture = architecture
        self._weights = weights
        self._kernels = kernels
        cos, sin = rotary_tables(architecture.rope, head_dim=architecture.head_dim, context_length=context_length)
        self._cos = cos.to(weights.embedding)
        self._sin = sin.to(weights.embedding)

    def forward(self, step: Pass, cache: KeyValues) -> Tensor:
        """Write the rows' keys and values and return their hidden states, before the last norm. ``(R, hidden)``."""
        hidden_R = functional.embedding(step.token_ids, self._weights.embedding)
        cos_R1D, sin_R1D = self._cos[step.positions, None], self._sin[step.positions, None]
        masks = [_causal_mask(segment, hidden_R) for segment in step.segments]
        eps = self.architecture.rms_norm_eps
        for index, layer in enumerate(self._weights.layers):
            normed_R = self._kernels.rms_norm(hidden_R, layer.attention_norm, eps)
            query_RKGD, key_RKD, value_RKD = self._project(layer, normed_R, cos_R1D, sin_R1D)
            keys_NKSD, values_NKSD = cache.keys[index], cache.values[index]
            _write(keys_NKSD, key_RKD, step)
            _write(values_NKSD, value_RKD, step)
            attended_R = _attend(step, masks, query_RKGD, keys_NKSD, values_NKSD)
            hidden_R = hidden_R + self._kernels.linear(attended_R, layer.output, layer.output_bias)
            hidden_R = hidden_R + self._mlp(layer, self._kernels.rms_norm(hidden_R, layer.mlp_norm, eps))
        return hidden_R

    def logits(self, hidden_R: Tensor) -> Tensor:
        """Return float32 logits ``(R, vocabulary)`` for hidden states of :meth:`forward`."""
        normed_R = self._kernels.rms_norm(hidden_R, self._weights.norm, self.architecture.rms_norm_eps)
        return self._kernels.linear(normed_R, self._weights.head, None).float()

    def _project(
        self, layer: LayerWeights, normed_R: Tensor, cos_R1D: Tensor, sin_R1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.architecture
        num_rows = normed_R.shape[0]
        qkv_R = self._kernels.linear(normed_R, layer.qkv, layer.qkv_bias)
        rotated_size = sizes.query_size + sizes.kv_size
        rotated_RHD = qkv_R[:, :rotated_size].reshape(num_rows, -1, sizes.head_dim)
        value_RKD = qkv_R[:, rotated_size:].reshape(num_rows, sizes.num_kv_heads, sizes.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query_RHD, key_RKD = torch.split(rotated_RHD, [sizes.num_heads, sizes.num_kv_heads], dim=1)
            normed = [self._head_norm(query_RHD, layer.query_norm), self._head_norm(key_RKD, layer.key_norm)]
            rotated_RHD = torch.cat(normed, dim=1)
        rotated_RHD = _rotate(rotated_RHD, cos_R1D, sin_R1D)
        query_RHD, key_RKD = torch.split(rotated_RHD, [sizes.num_heads, sizes.num_kv_heads], dim=1)
        query_RKGD = query_RHD.reshape(num_rows, sizes.num_kv_heads, -1, sizes.head_dim)
        return query_RKGD, key_RKD, value_RKD

    def _head_norm(self, heads_RHD: Tensor, weight_D: Tensor) -> Tensor:
        flat = heads_RHD.reshape(-1, heads_RHD.shape[-1])
        return self._kernels.rms_norm(flat, weight_D, self.architecture.rms_norm_eps).view(heads_RHD.shape)

    def _mlp(self, layer: LayerWeights, normed_R: Tensor) -> Tensor:
        gate_R, up_R = self._kernels.linear(normed_R, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return self._kernels.linear(self._kernels.gate(gate_R, up_R), layer.down, layer.down_bias)


def _rotate(rows_RHD: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head; the tables hold D/2 columns."""
    first, second = rows_RHD.chunk(2, dim=-1)
    return torch.cat([first * cos_R1D - second * sin_R1D, second * cos_R1D + first * sin_R1D], dim=-1)


def _write(cache_NKSD: Tensor, rows_RKD: Tensor, step: Pass) -> None:
    if step.written_rows is not None:
        rows_RKD = rows_RKD[step.written_rows]
    cache_NKSD[step.written_slots, :, step.written_positions] = rows_RKD


def _attend(
    step: Pass, masks: Sequence[Tensor | None], query_RKGD: Tensor, keys_NKSD: Tensor, values_NKSD: Tensor
) -> Tensor:
    # Rows without a request stay 0: a fixed number of rows is computed in deterministic mode.
    attended_RKGD = torch.zeros_like(query_RKGD)
    if step.decode is not None:
        num_rows = step.decode.slots.shape[0]
        attended_RKGD[:num_rows] = _attend_together(step.decode, query_RKGD[:num_rows], keys_NKSD, values_NKSD)
    for segment, mask_TS in zip(step.segments, masks, strict=True):
        attended_RKGD[segment.start : segment.end] = _attend_alone(
            query_RKGD[segment.start : segment.end],
            keys_NKSD[segment.slot, :, : segment.length],
            values_NKSD[segment.slot, :, : segment.length],
            mask_TS,
        )
    return attended_RKGD.flatten(1)


def _attend_together(decode: DecodeRows, query_RKGD: Tensor, keys_NKSD: Tensor, values_NKSD: Tensor) -> Tensor:
    query_NKGD = query_RKGD
    if not decode.fills_slots:
        query_NKGD = query_RKGD.new_zeros(decode.num_slots, *query_RKGD.shape[1:])
        query_NKGD[decode.slots] = query_RKGD
    keys_NKSD = keys_NKSD[: decode.num_slots, :, : decode.length]
    values_NKSD = values_NKSD[: decode.num_slots, :, : decode.length]
    attended_NKGD = _attention(query_NKGD, keys_NKSD, values_NKSD, decode.mask)
    return attended_NKGD if decode.fills_slots else attended_NKGD[decode.slots]


def _attend_alone(query_TKGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, mask_TS: Tensor | None) -> Tensor:
    num_rows, num_kv_heads, num_shared, head_dim = query_TKGD.shape
    # A copy of its own: where a row lies in memory changes the last bits of a product (MKL).
    query_KTGD = query_TKGD.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    query_KJD = query_KTGD.view(num_kv_heads, num_rows * num_shared, head_dim)
    mask_JS = None if mask_TS is None else mask_TS.repeat_interleave(num_shared, dim=0)
    attended_KJD = _attention(query_KJD[None], keys_KSD[None], values_KSD[None], mask_JS)[0]
    return attended_KJD.view(num_kv_heads, num_rows, num_shared, head_dim).transpose(0, 1)


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(query keys^T / sqrt(D) + mask) values; the leading axes are slots and key/value heads."""
    if query.is_cuda:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    # On the CPU this is as fast as the fused form, whose rows are not independent of each other.
    scores = torch.matmul(query * query.shape[-1] ** -0.5, keys.transpose(-1, -2))
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(scores.softmax(dim=-1), values)


def _causal_mask(segment: Segment, like: Tensor) -> Tensor | None:
    num_rows = segment.end - segment.start
    if num_rows == 1:
        return None
    positions_T = torch.arange(segment.length - num_rows, segment.length, device=like.device)
    hidden_TS = torch.arange(segment.length, device=like.device) > positions_T[:, None]
    return torch.zeros(hidden_TS.shape, device=like.device, dtype=like.dtype).masked_fill_(hidden_TS, -math.inf)


def _lazy_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros that, on the CPU, take memory only where they are written to.

    Mapped directly: numpy asks the kernel for huge pages, which a short request would pay for whole.
    """
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=dtype).view(shape)
