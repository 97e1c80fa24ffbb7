"""Conversion of small GGUF files that are written here, from random transformers models."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import struct
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from rollfeed.engine import check_checkpoint, resolve_checkpoint
from rollfeed.errors import CheckpointError
from rollfeed.prompts import load_tokenizer

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=256,
        **changes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5, 0.3)
    return model


def gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{suffix}"


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of query and key rows that llama.cpp wants: the two halves of a head row by row."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    architecture: str = "llama",
    tokenizer: dict[str, Any] | None = None,
    **scalars: Any,
) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in scalars.items():
        writer.add_key_value(f"llama.{name.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer)
    for name, value in (tokenizer or {}).items():
        getattr(writer, f"add_{name}")(value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, target = tensor.numpy(), gguf_name(name)
        part = target.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        if kind is not None and values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Byte-level tokens, one special token and one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    tokens += ["<|end|>", "he", "<|spare1|>", "<|spare2|>"]
    kinds = [1] * 256 + [3, 1, 3, 3]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)


CHATML = (
    "{% for m in messages %}{{ '<|spare1|>' + m['role'] + '\n' + m['content'] + '<|spare2|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|spare1|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, (256,)),
        ({"eot_token_id": 259}, (256, 259)),
        ({"eot_token_id": 259, "eom_token_id": 258}, (256, 259, 258)),
        ({"eot_token_id": 256}, (256,)),
        ({"chat_template": CHATML}, (256, 259)),
        ({"chat_template": CHATML.replace("<|spare2|>", " <|end|>")}, (256,)),
        ({"chat_template": CHATML.replace("<|spare2|>", " he")}, (256,)),
        ({"chat_template": "{{ raise_exception('users only') }}"}, (256,)),
    ],
)
def test_a_response_ends_with_the_text_and_with_the_turn(
    tmp_path: Path, metadata: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model(), tokenizer=metadata)
    folder = resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache")
    assert load_tokenizer(folder).eos_token_ids == expected


def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is a Git LFS pointer, not the weights: run git lfs pull"):
        check_checkpoint(str(tmp_path / "tiny.gguf"))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"rope_parameters": LLAMA3}],
    ids=["plain", "tied", "biases", "llama3"],
)
def test_a_converted_model_computes_what_the_original_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache")
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.arange(60)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(token_ids).logits, model(token_ids).logits, atol=1e-4, rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("he said: é").input_ids) == "he said: é"
    assert (tokenizer.eos_token_id, tokenizer("he").input_ids) == (256, [257])
    assert converted.config.eos_token_id == 256


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_tensors_come_out_at_full_width(tmp_path: Path, kind: str) -> None:
    model = make_model()
    write_gguf(tmp_path / "tiny.gguf", model, kind=gguf.GGMLQuantizationType[kind])
    folder = resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache")
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, expected in model.state_dict().items():
        difference = (converted.state_dict()[name] - expected).abs().max()
        assert float(difference) < (0.15 if kind == "Q4_0" else 0.02), name


def test_the_second_time_nothing_is_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    with caplog.at_level(logging.INFO, logger="rollfeed"):
        first = resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache")
        assert "converting tiny.gguf" in caplog.text
        caplog.clear()
        (tmp_path / "copy").mkdir()
        (tmp_path / "tiny.gguf").rename(tmp_path / "copy" / "tiny.gguf")
        assert resolve_checkpoint(str(tmp_path / "copy" / "tiny.gguf"), cache_directory=tmp_path / "cache") == first
        assert not caplog.text
    write_gguf(tmp_path / "tiny.gguf", make_model(rms_norm_eps=1e-3))
    assert resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache") != first


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_checkpoint(str(tmp_path / "tiny.gguf")).parent == tmp_path / "xdg" / "rollfeed" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_checkpoint(str(tmp_path / "tiny.gguf")).parent == tmp_path / "home/.cache/rollfeed/models"


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache")


def test_what_a_killed_conversion_left_is_never_used_and_goes_away(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    cache = tmp_path / "cache"
    old, new = cache / ".tiny-1-old.partial", cache / ".tiny-1-new.partial"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
    os.utime(old, (0, 0))
    folder = resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=cache)
    assert sorted(path.name for path in cache.iterdir()) == [new.name, folder.name]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model(), expert_count=4)
    with pytest.raises(CheckpointError, match="mixture-of-experts"):
        resolve_checkpoint(str(tmp_path / "tiny.gguf"), cache_directory=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_two_processes_at_once_end_with_one_whole_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    resolve = partial(resolve_checkpoint, cache_directory=tmp_path / "cache")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as processes:
        folders = set(processes.map(resolve, [str(tmp_path / "tiny.gguf")] * 2))
    assert folders == set((tmp_path / "cache").iterdir())
    assert len(folders) == 1


def spoiled(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_files_that_are_no_gguf_are_refused_before_anything_is_converted(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"PK\x03\x04 something else", b"GGUF" + struct.pack("<IQQ", 3, 0, 5) + b"\xff" * 40):
        with pytest.raises(CheckpointError, match=r"not a readable GGUF file|is a zip archive") as caught:
            check_checkpoint(spoiled(tmp_path / "bad.gguf", content))
        assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model())
    content = (tmp_path / "tiny.gguf").read_bytes()
    for length in (2000, len(content) - 5000):
        with pytest.raises(CheckpointError, match="not a readable GGUF file") as caught:
            resolve_checkpoint(spoiled(tmp_path / "cut.gguf", content[:length]), cache_directory=tmp_path / "cache")
        assert "\n" not in str(caught.value)


def test_other_architectures_are_refused_before_anything_is_converted(tmp_path: Path) -> None:
    write_gguf(tmp_path / "gemma.gguf", make_model(), architecture="gemma2")
    with pytest.raises(CheckpointError, match="architecture 'gemma2' cannot be converted"):
        check_checkpoint(str(tmp_path / "gemma.gguf"))


def test_linear_rope_scaling_is_kept_and_others_are_refused(tmp_path: Path) -> None:
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    write_gguf(tmp_path / "linear.gguf", make_model(), **scaled)
    folder = resolve_checkpoint(str(tmp_path / "linear.gguf"), cache_directory=tmp_path / "cache")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    write_gguf(tmp_path / "yarn.gguf", make_model(), rope__scaling__type="yarn")
    with pytest.raises(CheckpointError, match="rope scaling 'yarn'"):
        resolve_checkpoint(str(tmp_path / "yarn.gguf"), cache_directory=tmp_path / "cache")
