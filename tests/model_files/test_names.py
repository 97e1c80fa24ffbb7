"""Tensors of models by the names of their checkpoints, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollfeed.model_files import read_headers
from rollfeed.model_files.loading import load_causal_model
from rollfeed.model_files.names import CheckpointNames

FILE = "model.safetensors"
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {**SIZES, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
CONFIGS = [
    transformers.LlamaConfig(**SIZES, intermediate_size=24, tie_word_embeddings=True),
    transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, head_dim=4),  # experts are fused
    transformers.MixtralConfig(**SIZES, intermediate_size=8, num_local_experts=4),  # and renamed
    transformers.ApertusConfig(**SIZES, intermediate_size=24),  # buffers of its activation
    transformers.DeepseekV3Config(  # a buffer of its router
        **{**EXPERTS, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        intermediate_size=24,
    ),
    transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=64),  # tied
]


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: str(config.model_type))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(request.param)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(0, 0.2)
    made = tmp_path_factory.mktemp(request.param.model_type)
    model.save_pretrained(made)
    return made


def opened(folder: Path) -> tuple[Any, CheckpointNames]:
    model = load_causal_model(folder, dtype=torch.float32)
    return model, CheckpointNames(model, read_headers(folder))


def replace(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_model_gives_back_the_tensors_of_its_checkpoint(folder: Path) -> None:
    _, names = opened(folder)
    tensors = names.tensors()
    assert_equal(tensors, load_file(folder / FILE))
    assert {name: names.shapes[name] for name in tensors} == {name: tuple(t.shape) for name, t in tensors.items()}


def test_tensors_of_a_checkpoint_become_a_models(folder: Path) -> None:
    model, names = opened(folder)
    changed = {name: tensor + 1 for name, tensor in load_file(folder / FILE).items()}
    replace(model, names.convert(changed))
    assert_equal(names.tensors(), changed)


def test_one_tensor_alone_leaves_the_others_as_they_are(folder: Path) -> None:
    model, names = opened(folder)
    expected = load_file(folder / FILE)
    for name in expected:
        expected[name] = expected[name] * 2
        replace(model, names.convert({name: expected[name]}))
        assert_equal(names.tensors(), expected)


def test_names_without_the_prefix_of_the_models_body_are_kept(folder: Path, tmp_path: Path) -> None:
    def shortened(name: str) -> str:
        return name.removeprefix("model.").removeprefix("transformer.")

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    stored = {shortened(name): tensor for name, tensor in load_file(folder / FILE).items()}
    save_file(stored, tmp_path / FILE, metadata={"format": "pt"})
    _, names = opened(tmp_path)
    assert_equal(names.tensors(), stored)


def test_tied_weights_have_the_names_that_the_checkpoint_has(tmp_path: Path) -> None:
    folder, embedding = tmp_path / "saved", "model.embed_tokens.weight"
    transformers.AutoModelForCausalLM.from_config(CONFIGS[0]).save_pretrained(folder)
    stored = load_file(folder / FILE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for other in ({}, {embedding: stored[embedding].clone()}):  # the head alone, and both
        kept = {name: tensor for name, tensor in stored.items() if name != embedding}
        both = {**kept, **other, "lm_head.weight": stored[embedding]}
        save_file(both, tmp_path / FILE, metadata={"format": "pt"})
        _, names = opened(tmp_path)
        assert_equal(names.tensors(), both)
        assert names.ties["lm_head.weight"] == names.ties[embedding]


def test_what_needs_no_conversion_is_the_models_own_memory(folder: Path) -> None:
    model, names = opened(folder)
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    copies = [name for name, tensor in names.tensors().items() if tensor.data_ptr() not in own]
    assert all(".experts." in name for name in copies)
