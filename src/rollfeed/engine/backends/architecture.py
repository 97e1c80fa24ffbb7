"""Models that the embedded engine computes itself, and their dimensions. Imported without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3")
_CHANGING_ROPE_TYPES = ("longrope", "su")
_CHOSEN_TOKENS = {"index_topk", "indexer_budget", "index_topk_blocks"}
"""What configurations call the number of tokens, or blocks of them, that attention chooses among those before."""
_BLOCK_OF_CHOSEN = "index_block_size"
_DEFAULT_SLIDING_WINDOW = 4096
"""What transformers takes for a Mistral config without the key."""
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding, as ``config.json`` describes it."""

    theta: float
    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The dimensions and switches of a Llama-like decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norm: bool
    tied_head: bool
    rope: Rope

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights by Hugging Face name, the head's too where it is the embedding.

        Raises:
            ValueError: If one has no place for a number.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        of_layer = {
            "input_layernorm.weight": (hidden,),
            **_linear("self_attn.q_proj", self.query_size, hidden, bias=self.qkv_bias),
            **_linear("self_attn.k_proj", self.kv_size, hidden, bias=self.qkv_bias),
            **_linear("self_attn.v_proj", self.kv_size, hidden, bias=self.qkv_bias),
            **_linear("self_attn.o_proj", hidden, self.query_size, bias=self.output_bias),
            "post_attention_layernorm.weight": (hidden,),
            **_linear("mlp.gate_proj", inner, hidden, bias=self.mlp_bias),
            **_linear("mlp.up_proj", inner, hidden, bias=self.mlp_bias),
            **_linear("mlp.down_proj", hidden, inner, bias=self.mlp_bias),
        }
        if self.query_key_norm:
            of_layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
        shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocab_size, hidden)}
        for name, shape in shapes.items():
            if any(type(size) is not int or size < 1 for size in shape):
                raise ValueError(f"{name} would be {' x '.join(map(str, shape))}")
        return shapes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read a ``config.json`` for which :func:`unsupported_reason` returned None."""
        model_type = config["model_type"]
        num_heads = config["num_attention_heads"]
        attention_bias = bool(config.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        default_head_dim = _QWEN3_HEAD_DIM if model_type == "qwen3" else config["hidden_size"] // num_heads
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or default_head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            query_key_norm=model_type == "qwen3",
            tied_head=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config),
        )


def _linear(name: str, num_outputs: int, num_inputs: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (num_outputs, num_inputs)}
    return {**shapes, f"{name}.bias": (num_outputs,)} if bias else shapes


def _rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the places where the versions of transformers keep the rope settings."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _rope_kind(values: Mapping[str, Any]) -> str:
    return str(values.get("rope_type") or values.get("type") or "default")


def _rope(config: Mapping[str, Any]) -> Rope:
    values = _rope_values(config)
    return Rope(
        theta=float(values.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=_rope_kind(values),
        factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_context_length=int(
            values.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0
        ),
    )


class Border(NamedTuple):
    """Up to how many tokens a text can be sampled and scored with the same result."""

    length: int
    reason: str


def border(config: Mapping[str, Any]) -> Border | None:
    """Return the shortest border of a model; None where a text may have any length."""
    found: list[Border] = []
    rope, key = _rope_values(config), "original_max_position_embeddings"
    for values in (rope, *_parts(rope)):
        if _rope_kind(values) in _CHANGING_ROPE_TYPES:
            length = int(values.get(key) or config.get(key) or 0)
            found.append(Border(length, "all positions of the model change when a text grows beyond that"))
    for part in (config, *_parts(config)):
        for name in _CHOSEN_TOKENS & part.keys():
            length = int(part[name] or 0) * int(part.get(_BLOCK_OF_CHOSEN, 1) if "blocks" in name else 1)
            found.append(Border(length, f"its attention chooses among tokens ({name}), and rounding changes which"))
    return min((each for each in found if each.length > 0), default=None)


def _parts(tree: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [value for value in tree.values() if isinstance(value, Mapping)]


def unsupported_reason(config: Mapping[str, Any], *, context_length: int) -> str | None:
    """Return why the embedded engine cannot compute this model itself, or None when it can."""
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        return f"model_type {model_type!r} is not one of {', '.join(_MODEL_TYPES)}"
    if config.get("quantization_config"):
        return "its weights are quantised"
    if config.get("hidden_act", "silu") != "silu":
        return f"its activation is {config['hidden_act']!r}, not 'silu'"
    rope = _rope_values(config)
    if _rope_kind(rope) not in _ROPE_TYPES:
        return f"its rope type is {_rope_kind(rope)!r}"
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        return "it rotates only a part of each head"
    window = _sliding_window(config)
    if window is not None and window < context_length:
        return f"its attention slides over {window} tokens, fewer than context_length = {context_length}"
    return None


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return over how many tokens some layer's attention slides; None when all of it is full."""
    if config["model_type"] == "mistral":
        window: int | None = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
        return window
    if config["model_type"] == "llama" or not config.get("use_sliding_window", False):
        return None
    window = config.get("sliding_window", _DEFAULT_SLIDING_WINDOW)
    return window


def rotary_tables(rope: Rope, *, head_dim: int, context_length: int) -> tuple[Tensor, Tensor]:
    """Return float32 cosines and sines ``(context_length, head_dim / 2)``.

    Sources: RoFormer (arXiv:2104.09864); linear scaling is position interpolation
    (arXiv:2306.15595); ``llama3`` keeps high frequencies, divides low ones by ``factor`` and blends
    between (The Llama 3 Herd of Models, arXiv:2407.21783).
    """
    import torch  # here, as the rest is asked by what loads no model

    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_context_length * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        frequencies = (1.0 - kept) * frequencies / rope.factor + kept * frequencies
    angles = torch.arange(context_length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()
