"""The weights of a Llama-like decoder, stored fused and replaced in place.

Query, key and value rows lie in one matrix, gate and up rows in another; :attr:`Weights.by_name`
has a view for every name that a Hugging Face checkpoint uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from rollfeed.engine.local.architecture import Architecture
from rollfeed.errors import EngineProtocolError


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


def replace_in_place(targets: Mapping[str, Tensor], tensors: Mapping[str, Any], *, complete: bool = False) -> None:
    """Copy ``tensors`` over the targets of the same name, after checking every one of them.

    Raises:
        EngineProtocolError: If a name is unknown or missing, a shape differs, a value is not finite,
            or two names of one tied target bring different values. Nothing has been changed then.
    """
    chosen: dict[int, str] = {}
    for name, value in tensors.items():
        target = targets.get(name)
        if target is None:
            raise EngineProtocolError(f"weight {name!r}: the model has no weight of this name")
        source = _checked(name, value, target)
        tied = chosen.setdefault(target.data_ptr(), name)
        if tied != name and not torch.equal(source, _as_tensor(tied, tensors[tied])):
            raise EngineProtocolError(f"weights {tied!r} and {name!r} are tied in the model, but differ")
    if complete:
        missing = sorted(name for name, target in targets.items() if target.data_ptr() not in chosen)
        if missing:
            raise EngineProtocolError(f"weight {missing[0]!r} is missing ({len(missing)} are)")
    with torch.no_grad():
        for name in chosen.values():
            targets[name].copy_(_as_tensor(name, tensors[name]))


def _checked(name: str, value: Any, target: Tensor) -> Tensor:
    source = _as_tensor(name, value)
    if source.shape != target.shape:
        raise EngineProtocolError(
            f"weight {name!r}: its shape is {tuple(source.shape)}, the model's {tuple(target.shape)}"
        )
    if not source.is_floating_point():
        raise EngineProtocolError(f"weight {name!r}: its values are {source.dtype}, not floating point")
    if not bool(torch.isfinite(source).all()):
        raise EngineProtocolError(f"weight {name!r}: some of its values are not finite")
    return source


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        # torch warns of read-only arrays, and takes no foreign byte order.
        usable = value.flags.writeable and value.dtype.isnative
        return torch.from_numpy(value if usable else value.astype(value.dtype.newbyteorder("=")))
    raise EngineProtocolError(f"weight {name!r}: neither a torch tensor nor a numpy array of floating point numbers")


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of safetensors files, each read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        readers: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._reader_of = {
            name: reader
            for reader in readers
            for name in reader.keys()  # noqa: SIM118 - the reader is no mapping
            # Older checkpoints carry a buffer that follows from the configuration.
            if not name.endswith("rotary_emb.inv_freq")
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._reader_of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader_of)

    def __len__(self) -> int:
        return len(self._reader_of)
