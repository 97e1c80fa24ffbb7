"""Conversion of a GGUF file to a folder in Hugging Face layout.

Reads Llama-family files of any quantisation that the ``gguf`` library knows, and writes
``config.json``, ``model.safetensors`` (float32) and the tokenizer's files. Does not import torch
itself; transformers does, to read the tokenizer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from rollfeed.errors import CheckpointError

SUPPORTED_ARCHITECTURE = "llama"
"""The GGUF architecture that can be converted; Mistral files carry this name too."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are more than text."""
_LONGEST_KEY = 65_535

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def read_architecture(path: Path) -> str | None:
    """Return the architecture a GGUF file names, reading only the start of its header.

    None when the name does not come before the first array, which a full read has to answer.

    Raises:
        CheckpointError: If the file is unreadable or not a GGUF file.
    """
    try:
        with path.open("rb") as file:
            return _scan_architecture(file)
    except (OSError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error


def _scan_architecture(file: BinaryIO) -> str | None:
    if file.read(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    _version, _num_tensors, num_keys = struct.unpack("<IQQ", file.read(20))
    for _ in range(num_keys):
        key = _read_string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if kind == _STRING:
            value = _read_string(file)
            if key == "general.architecture":
                return value
        elif kind in _SCALAR_FORMATS:
            file.read(struct.calcsize("<" + _SCALAR_FORMATS[kind]))
        else:
            return None
    return None


def _read_string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST_KEY:
        raise ValueError("a text in its header is too long")
    return file.read(length).decode()


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model in ``path`` into the existing, empty ``folder``.

    Raises:
        CheckpointError: If the file is damaged, or of another architecture than Llama.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error
    metadata = _metadata(reader)
    check_architecture(path, metadata.get("general.architecture"))
    try:
        config = _hugging_face_config(metadata, {tensor.name: tensor for tensor in reader.tensors})
        tensors = dict(_hugging_face_tensors(reader.tensors, config))
    except KeyError as error:
        raise CheckpointError(f"{path}: the GGUF file has no {error.args[0]}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ends = _end_ids(metadata, _special_ids(reader), _convert_tokenizer(path, folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n", encoding="utf-8")


def write_float32(path: Path, copy: Path) -> None:
    """Write a GGUF file of the same model whose weights are all float32.

    Raises:
        CheckpointError: If the file is damaged.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error
    writer = GGUFWriter(copy, SUPPORTED_ARCHITECTURE)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        kind, *rest = field.types
        writer.add_key_value(name, field.contents(), kind, rest[-1] if kind is GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_architecture(path: Path, architecture: str | None) -> None:
    """Raise CheckpointError unless ``architecture`` can be converted."""
    if architecture != SUPPORTED_ARCHITECTURE:
        raise CheckpointError(
            f"{path}: GGUF files of architecture {architecture!r} cannot be converted, only"
            f" {SUPPORTED_ARCHITECTURE!r}; give the model's safetensors folder instead"
        )


def _metadata(reader: Any) -> dict[str, Any]:
    """Return the header's values, without the vocabulary's long arrays."""
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")}


def _hugging_face_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    def read(key: str, *default: Any) -> Any:
        name = f"{SUPPORTED_ARCHITECTURE}.{key}"
        return metadata.get(name, *default) if default else metadata[name]

    if read("expert_count", 0):
        raise ValueError("mixture-of-experts GGUF files cannot be converted")
    hidden_size = int(read("embedding_length"))
    num_heads = int(read("attention.head_count"))
    head_dim = int(read("attention.key_length", 0)) or int(read("rope.dimension_count", hidden_size // num_heads))
    vocab_size, _ = tensors["token_embd.weight"].data.shape
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(vocab_size),
        "hidden_size": hidden_size,
        "intermediate_size": int(read("feed_forward_length")),
        "num_hidden_layers": int(read("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(read("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(read("context_length")),
        "rms_norm_eps": _shortest_float(read("attention.layer_norm_rms_epsilon")),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_theta": _shortest_float(read("rope.freq_base", 10_000.0)),
        "dtype": "float32",
    }
    scaling = _rope_scaling(metadata, tensors.get("rope_freqs.weight"), config["rope_theta"])
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _shortest_float(value: float) -> float:
    """Return the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(metadata: Mapping[str, Any], frequencies: Any, theta: float) -> dict[str, Any] | None:
    if frequencies is not None:
        return _llama3_scaling(np.asarray(frequencies.data, np.float64).reshape(-1), theta)
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata["llama.rope.scaling.factor"])}
    raise ValueError(f"rope scaling {kind!r} of a GGUF file cannot be converted")


def _llama3_scaling(divisors: NDArray[np.float64], theta: float) -> dict[str, Any]:
    """Recognise the Llama 3 scaling from the divisors that GGUF stores in its place."""
    factor = float(divisors.max())
    low, high, original = _LLAMA3_ROPE.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError("the rope frequencies of this GGUF file are not Llama 3's and cannot be converted")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _hugging_face_tensors(
    gguf_tensors: list[Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in gguf_tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in num_heads:
            values = _half_split_rows(values, num_heads[part])
        yield _hugging_face_name(tensor.name), np.ascontiguousarray(values)


def _hugging_face_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, suffix] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    raise ValueError(f"the tensor {name} is not part of a Llama model")


def _half_split_rows(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of query and key rows: rotation pairs side by side become two halves."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _convert_tokenizer(path: Path, folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except ImportError as error:
        raise CheckpointError(
            f"{path}: converting a GGUF tokenizer needs torch: pip install 'rollfeed[local]'"
        ) from error
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: its tokenizer cannot be converted ({reason})") from error
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def _special_ids(reader: Any) -> dict[str, int]:
    """Return the ids of the tokens that are no text, by name."""
    tokens, kinds = (reader.fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if tokens is None or kinds is None:
        return {}
    named = enumerate(zip(tokens.contents(), kinds.contents(), strict=False))
    # Users' own tokens are often runs of spaces; in angle brackets they are marks.
    return {
        name: number
        for number, (name, kind) in named
        if kind == _CONTROL or (kind == _USER_DEFINED and name.startswith("<") and name.endswith(">"))
    }


def _end_ids(metadata: Mapping[str, Any], special_ids: Mapping[str, int], tokenizer: Any) -> list[int]:
    """Return the ids that end a response: of the text's, the turn's and the message's end, and the template's."""
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    found = [*named, special_ids.get(_end_of_turn(tokenizer, special_ids))]
    return list(dict.fromkeys(int(number) for number in found if number is not None))


def _end_of_turn(tokenizer: Any, marks: Iterable[str]) -> str:
    """Return which mark the chat template puts behind an answer; nothing where it puts none."""
    answer = "ANSWER"
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError):  # there is none, or it wants other messages
        return ""
    _, is_there, behind = text.rpartition(answer)
    matches = [mark for mark in marks if mark and behind.lstrip().startswith(mark)]
    return max(matches, key=len) if is_there and matches else ""
