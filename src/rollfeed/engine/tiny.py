"""A small character model made on the spot, to train from nothing.

Source: the architecture is Llama's (arXiv:2302.13971); weights are normal with deviation 0.02, and the embeddings of
input and output are tied. Experts and routers have weights of deviation 1 over the root of their inputs, so that it
matters which experts are chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from rollfeed.base.atomic import make_once, user_cache
from rollfeed.config import TinyModelSettings

_FORMAT = 1
"""Raised when something else would be written; older folders are then not used."""
_END, _UNKNOWN = "<end>", "<unknown>"
_DEVIATION = 0.02
_CONTEXT_LENGTH = 2048
_NUM_EXPERTS = 8
_EXPERTS_A_TOKEN = 2


def tiny_checkpoint(
    settings: TinyModelSettings, *, seed: int, cache_directory: Path | None = None, has_experts: bool = False
) -> Path:
    """Return the folder of the model that ``settings`` and ``seed`` describe, made now if there is none.

    With experts it is Qwen's mixture of eight, of which two compute a token (arXiv:2505.09388). By default it is kept
    in the user's cache directory.

    Raises:
        CheckpointError: If it cannot be kept there.
    """
    kind, write = ("tiny-moe", _write_experts) if has_experts else ("tiny", _write)
    return made_checkpoint(kind, settings, seed=seed, cache_directory=cache_directory, write=write)


def made_checkpoint(
    kind: str,
    settings: TinyModelSettings,
    *,
    seed: int,
    cache_directory: Path | None,
    write: Callable[[Path, TinyModelSettings, int], None],
) -> Path:
    """Return the folder of a model of a kind, as :func:`tiny_checkpoint` does of its own."""
    cache = cache_directory or user_cache("models")
    identity = json.dumps([_FORMAT, seed, settings.model_dump()])
    folder = cache / f"{kind}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return make_once(folder, lambda partial: write(partial, settings, seed))


def _write(folder: Path, settings: TinyModelSettings, seed: int) -> None:
    vocab_size = write_tokenizer(folder, settings)
    write_json(folder / "config.json", llama_config(settings, vocab_size))
    write_weights(folder, llama_weights(settings, vocab_size, np.random.default_rng(seed)))


def _write_experts(folder: Path, settings: TinyModelSettings, seed: int) -> None:
    vocab_size, random, width = write_tokenizer(folder, settings), np.random.default_rng(seed), settings.hidden_size
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 2 * width,
        "num_experts": _NUM_EXPERTS,
        "num_experts_per_tok": _EXPERTS_A_TOKEN,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    write_json(folder / "config.json", {**llama_config(settings, vocab_size), **experts})
    weights = {name: each for name, each in llama_weights(settings, vocab_size, random).items() if ".mlp." not in name}
    shapes = {"gate_proj": (2 * width, width), "up_proj": (2 * width, width), "down_proj": (width, 2 * width)}
    for layer in range(settings.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{name}.weight"] = np.ones(width // settings.num_heads, np.float32)
        made = {"gate.weight": (_NUM_EXPERTS, width)} | {
            f"experts.{number}.{name}.weight": shape for number in range(_NUM_EXPERTS) for name, shape in shapes.items()
        }
        for name, shape in made.items():
            weights[f"{prefix}.mlp.{name}"] = (random.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
    write_weights(folder, weights)


def write_tokenizer(folder: Path, settings: TinyModelSettings, *, named: Mapping[str, str] | None = None) -> int:
    """Write the tokenizer's files; return how many tokens it has.

    ``named`` are special tokens beside the common ones, by what transformers calls them.
    """
    special = [_END, _UNKNOWN, *(named or {}).values()]
    tokens = [_END, _UNKNOWN, *settings.characters, *settings.words, *special[2:]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = _tokenizer(vocabulary, special=special, words=settings.words)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _END, "unk_token": _UNKNOWN}
    write_json(folder / "tokenizer_config.json", {**about, **({"extra_special_tokens": dict(named)} if named else {})})
    return len(vocabulary)


def _tokenizer(vocabulary: dict[str, int], *, special: Sequence[str], words: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def llama_config(settings: TinyModelSettings, vocab_size: int) -> dict[str, Any]:
    """Return the configuration of the language model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 4 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_heads,
        "head_dim": settings.hidden_size // settings.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": _CONTEXT_LENGTH,
        "initializer_range": _DEVIATION,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def llama_weights(
    settings: TinyModelSettings, vocab_size: int, random: np.random.Generator
) -> dict[str, NDArray[np.float32]]:
    """Return the language model's weights by Hugging Face name, matrices as ``(out, in)``."""
    width = settings.hidden_size
    inner = 4 * width

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * _DEVIATION).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, width)}
    for layer in range(settings.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(width, width)
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(inner, width)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(inner, width)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(width, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(width, np.float32)
    return weights | {"model.norm.weight": np.ones(width, np.float32)}


def write_weights(folder: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    """Write all weights of a model as its one file."""
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value as a file that people can read."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
