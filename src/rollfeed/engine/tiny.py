"""A small character model made on the spot, to train from nothing.

Source: the architecture is Llama's (arXiv:2302.13971); weights are normal with deviation 0.02, and the embeddings of
input and output are tied.
"""

from __future__ import annotations

import hashlib
import json
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


def tiny_checkpoint(settings: TinyModelSettings, *, seed: int, cache_directory: Path | None = None) -> Path:
    """Return the folder of the model that ``settings`` and ``seed`` describe, made now if there is none.

    By default it is kept in the user's cache directory.

    Raises:
        CheckpointError: If it cannot be kept there.
    """
    cache = cache_directory or user_cache("models")
    identity = json.dumps([_FORMAT, seed, settings.model_dump()])
    folder = cache / f"tiny-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return make_once(folder, lambda partial: _write(partial, settings, seed))


def _write(folder: Path, settings: TinyModelSettings, seed: int) -> None:
    vocabulary = {token: number for number, token in enumerate([_END, _UNKNOWN, *settings.characters])}
    (folder / "tokenizer.json").write_text(_tokenizer(vocabulary).to_str(pretty=True), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "pad_token": _END, "unk_token": _UNKNOWN},
    )
    _write_json(folder / "config.json", _config(settings, len(vocabulary)))
    (folder / "model.safetensors").write_bytes(
        save(_weights(settings, len(vocabulary), seed), metadata={"format": "pt"})
    )


def _tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.add_special_tokens([_END, _UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _config(settings: TinyModelSettings, vocab_size: int) -> dict[str, Any]:
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


def _weights(settings: TinyModelSettings, vocab_size: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return all weights by Hugging Face name, matrices as ``(out, in)``."""
    random, width = np.random.default_rng(seed), settings.hidden_size
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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
