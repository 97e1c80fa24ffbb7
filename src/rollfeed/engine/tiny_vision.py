"""A small model that sees, made on the spot: it reads characters and pictures, and knows nothing of either.

Source: the architecture is LLaVA's (arXiv:2304.08485): the patches of a CLIP (arXiv:2103.00020) become tokens of the
language model of :mod:`rollfeed.engine.tiny` through two layers. Names are those of LLaVA's checkpoints, which
transformers, SGLang and vLLM load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import (
    llama_config,
    llama_weights,
    made_checkpoint,
    write_json,
    write_tokenizer,
    write_weights,
)

_IMAGE = "<image>"
_DEVIATION = 0.02
_PROJECTED = 0.1
"""Deviation of what brings pictures into the language model: at 0.02 they would hardly change what it says."""
_MEAN, _STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
)


def tiny_vision_checkpoint(settings: TinyModelSettings, *, seed: int, cache_directory: Path | None = None) -> Path:
    """Return the folder of the model that ``settings`` and ``seed`` describe, made now if there is none.

    By default it is kept in the user's cache directory.

    Raises:
        CheckpointError: If it cannot be kept there.
    """
    return made_checkpoint("tiny-vision", settings, seed=seed, cache_directory=cache_directory, write=_write)


def _write(folder: Path, settings: TinyModelSettings, seed: int) -> None:
    vocab_size = write_tokenizer(folder, settings, named={"image_token": _IMAGE})
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    write_json(folder / "config.json", _config(settings, vocab_size))
    write_json(folder / "preprocessor_config.json", _image_processor(settings))
    write_json(folder / "processor_config.json", _processor(settings))
    random = np.random.default_rng(seed)
    language = llama_weights(settings, vocab_size, random)
    write_weights(
        folder,
        {
            **{f"language_model.{name}": values for name, values in language.items()},
            **{f"vision_tower.vision_model.{name}": values for name, values in _clip_weights(settings, random).items()},
            **_projector_weights(settings, random),
        },
    )


def _config(settings: TinyModelSettings, vocab_size: int) -> dict[str, Any]:
    text = llama_config(settings, vocab_size)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": settings.hidden_size,
            "intermediate_size": 4 * settings.hidden_size,
            "projection_dim": settings.hidden_size,
            "num_hidden_layers": settings.num_vision_layers,
            "num_attention_heads": settings.num_heads,
            "image_size": settings.image_size,
            "patch_size": settings.patch_size,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
        },
        "image_token_index": vocab_size - 1,
        "image_seq_length": (settings.image_size // settings.patch_size) ** 2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        **{name: text[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
        "vocab_size": vocab_size,
        "torch_dtype": "float32",
    }


def _image_processor(settings: TinyModelSettings) -> dict[str, Any]:
    side = settings.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _MEAN,
        "image_std": _STD,
    }


def _processor(settings: TinyModelSettings) -> dict[str, Any]:
    return {
        "processor_class": "LlavaProcessor",
        "image_token": _IMAGE,
        "patch_size": settings.patch_size,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }


def _clip_weights(settings: TinyModelSettings, random: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Return the weights of what sees by Hugging Face name; it has a place more than patches, for the whole."""
    width, patch = settings.hidden_size, settings.patch_size
    inner, num_places = 4 * width, (settings.image_size // patch) ** 2 + 1
    weights = {
        "embeddings.class_embedding": _drawn(random, width),
        "embeddings.patch_embedding.weight": _drawn(random, width, 3, patch, patch),
        "embeddings.position_embedding.weight": _drawn(random, num_places, width),
    }
    for name in ("pre_layrnorm", "post_layernorm"):
        weights |= _norm(name, width)
    for layer in range(settings.num_vision_layers):
        prefix = f"encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights |= _linear(random, f"{prefix}.self_attn.{name}", width, width)
        weights |= _linear(random, f"{prefix}.mlp.fc1", inner, width)
        weights |= _linear(random, f"{prefix}.mlp.fc2", width, inner)
        weights |= {**_norm(f"{prefix}.layer_norm1", width), **_norm(f"{prefix}.layer_norm2", width)}
    return weights


def _projector_weights(settings: TinyModelSettings, random: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    width, prefix = settings.hidden_size, "multi_modal_projector"
    return {
        **_linear(random, f"{prefix}.linear_1", width, width, deviation=_PROJECTED),
        **_linear(random, f"{prefix}.linear_2", width, width, deviation=_PROJECTED),
    }


def _drawn(random: np.random.Generator, *shape: int, deviation: float = _DEVIATION) -> NDArray[np.float32]:
    return (random.standard_normal(shape) * deviation).astype(np.float32)


def _linear(
    random: np.random.Generator, name: str, rows: int, columns: int, *, deviation: float = _DEVIATION
) -> dict[str, NDArray[np.float32]]:
    weight = _drawn(random, rows, columns, deviation=deviation)
    return {f"{name}.weight": weight, f"{name}.bias": np.zeros(rows, np.float32)}


def _norm(name: str, width: int) -> dict[str, NDArray[np.float32]]:
    return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}
