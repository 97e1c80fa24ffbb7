"""The weights of a Llama-like decoder, stored fused and replaced in place.

Query, key and value rows lie in one matrix, gate and up rows in another; :attr:`Weights.by_name`
has a view for every name that a Hugging Face checkpoint uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollfeed.engine.local.architecture import Architecture
from rollfeed.engine.local.weights import replace_in_place


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


class Weights:
    """Storage for all weights; uninitialised until :meth:`load` has been given a whole checkpoint."""

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
        """Of all weights, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.by_name.items()}

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
        """Replace the named weights in place, all of them or none.

        Args:
            tensors: numpy or torch tensors by Hugging Face name.
            complete: Whether every weight must be among them.

        Raises:
            EngineProtocolError: If a name is unknown or missing, a shape differs or a value is not finite.
        """
        replace_in_place(self.by_name, tensors, complete=complete)
