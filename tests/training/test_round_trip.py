"""What training leaves is the model it had, in the form of the checkpoint it began with, and can be trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollfeed.config.train import TrainSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.model_files import read_headers, weight_files
from rollfeed.testing import CharTokenizer
from rollfeed.training.trainer import Trainer
from rollfeed.types import Completion, SamplingParams
from rollfeed.weights import write_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROUTED: dict[str, Any] = {
    **SIZES,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "activation": lambda: transformers.ApertusConfig(**SIZES, num_key_value_heads=2),
    "router": lambda: transformers.DeepseekV3Config(
        **ROUTED,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
    "router of GLM": lambda: transformers.Glm4MoeConfig(**ROUTED, num_key_value_heads=2, head_dim=4),
}
IN_FULL = ("e_score_correction_bias", "act_fn.beta", "norm.weight")
"""What a checkpoint of bf16 may have in fp32."""
TOKENS = torch.arange(5, 45)[None]
OWN_MODEL = """
import torch
from transformers import LlamaForCausalLM

from .own_configuration import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.ones(config.vocab_size))

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * self.scale
        return found
"""
OWN_CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""


def save(config: Any, folder: Path, *, max_shard_size: str = "50GB") -> Path:
    """Write a random model of bf16, of which some tensors are fp32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(1.0 if "norm" in name else 0.2, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for file in weight_files(folder):
        tensors = load_file(file)
        tensors |= {name: tensor.float() * 1.0001 for name, tensor in tensors.items() if name.endswith(IN_FULL)}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(MODELS[request.param](), tmp_path / "source")


@pytest.fixture
def written(checkpoint: Path, tmp_path: Path, make_trainer, batch_by_seed) -> tuple[Trainer, Path]:
    """Train a little, and return the trainer and what it leaves."""
    trainer = make_trainer(checkpoint=checkpoint)
    trainer.train_step(batch_by_seed(3))
    write_checkpoint(trainer.weights(), tmp_path / "model", checkpoint=checkpoint)
    return trainer, tmp_path / "model"


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits[0].float()
    return found


def test_it_has_the_tensors_of_its_checkpoint_in_the_types_that_they_have_there(
    checkpoint: Path, written: tuple[Trainer, Path]
) -> None:
    trainer, model = written
    theirs, ours = read_headers(checkpoint), read_headers(model)
    assert ours == theirs
    assert {header.dtype for header in ours.values()} == {"BF16", "F32"}
    assert all(tensor.dtype is torch.float32 for tensor in trainer.weights().values())
    with safe_open(model / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_and_a_trainer_find_the_trainers_logits_in_it(
    written: tuple[Trainer, Path], make_trainer, batch_by_seed
) -> None:
    trainer, model = written
    exact = logits_of(trainer.policy.model)
    loader: Any = transformers.AutoModelForCausalLM
    loaded, found = loader.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = logits_of(loaded.eval())
    torch.testing.assert_close(ours, exact, atol=0.1, rtol=0.02)
    again = make_trainer(checkpoint=model)
    torch.testing.assert_close(logits_of(again.policy.model), ours, atol=1e-5, rtol=1e-5)
    before = {name: tensor.clone() for name, tensor in again.weights().items()}
    assert again.train_step(batch_by_seed(4)).num_updates == 1
    assert any(not torch.equal(tensor, before[name]) for name, tensor in again.weights().items())


def test_weights_that_were_not_trained_come_back_bit_by_bit(checkpoint: Path, tmp_path: Path, make_trainer) -> None:
    write_checkpoint(make_trainer(checkpoint=checkpoint).weights(), tmp_path / "model", checkpoint=checkpoint)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_the_embedded_engine_says_of_it_what_the_trainer_says(written: tuple[Trainer, Path], make_trainer) -> None:
    _, model = written
    engine = create_local_engine(
        checkpoint=model,
        tokenizer=CharTokenizer(),
        threads=1,
        num_slots=1,
        context_length=64,
        deterministic=False,
        device="cpu",
    )

    async def sampled() -> Completion:
        prompt_ids = TOKENS[0].numpy().astype(np.int32)
        async with engine:
            return await engine.generate(prompt_ids, SamplingParams(max_new_tokens=8, seed=1), request_id="r")

    completion = asyncio.run(sampled())
    token_ids_R = torch.from_numpy(completion.token_ids).long()
    with torch.no_grad():
        logits_RV = make_trainer(checkpoint=model).policy.model(torch.cat([TOKENS[0], token_ids_R])[None]).logits[0]
    expected_R = logits_RV[-9:-1].log_softmax(-1).gather(1, token_ids_R[:, None])[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected_R.numpy(), atol=1e-4)


def test_a_checkpoint_in_several_files_is_written_in_those_with_its_index(
    tmp_path: Path, make_trainer, batch_by_seed
) -> None:
    checkpoint = save(MODELS["router"](), tmp_path / "source", max_shard_size="12KB")
    trainer = make_trainer(checkpoint=checkpoint)
    trainer.train_step(batch_by_seed(3))
    write_checkpoint(trainer.weights(), tmp_path / "model", checkpoint=checkpoint)
    shards = [file.name for file in weight_files(checkpoint)]
    assert len(shards) > 2
    assert sorted(path.name for path in (tmp_path / "model").glob("*.safetensors")) == shards
    theirs, ours = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (checkpoint, tmp_path / "model")
    )
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_parameters"] == theirs["metadata"]["total_parameters"]
    headers = read_headers(tmp_path / "model")
    sizes = [np.prod(header.shape) * {"BF16": 2, "F32": 4}[header.dtype] for header in headers.values()]
    assert ours["metadata"]["total_size"] == sum(sizes)
    assert headers == read_headers(checkpoint)
    make_trainer(checkpoint=tmp_path / "model")


def test_a_model_with_code_of_its_own_keeps_its_code_and_its_buffers(tmp_path: Path) -> None:
    source, model = tmp_path / "source", tmp_path / "model"
    save(MODELS["tied"](), source)
    (source / "own_model.py").write_text(OWN_MODEL)
    (source / "own_configuration.py").write_text(OWN_CONFIGURATION)
    config = json.loads((source / "config.json").read_text())
    auto_map = {"AutoConfig": "own_configuration.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (source / "config.json").write_text(json.dumps(config))
    scale = torch.linspace(0.5, 2.0, 259)
    save_file({**load_file(source / "model.safetensors"), "scale": scale}, source / "model.safetensors")
    own_code = partial(
        Trainer,
        settings=TrainSettings(device="cpu", threads=1),
        temperature=1.0,
        num_batches=1,
        max_response_length=8,
        trust_remote_code=True,
    )
    trainer = own_code(source)
    write_checkpoint(trainer.weights(), model, checkpoint=source)
    assert torch.equal(load_file(model / "model.safetensors")["scale"], scale)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True, dtype=torch.float32)
    torch.testing.assert_close(logits_of(loaded.eval()), logits_of(trainer.policy.model))
    own_code(model)


def test_a_trainers_state_has_the_buffers_of_its_model(tmp_path: Path, make_trainer) -> None:
    checkpoint = save(MODELS["router"](), tmp_path / "source")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    trainer, other = make_trainer(checkpoint=checkpoint), make_trainer(checkpoint=checkpoint)
    with torch.no_grad():
        trainer.weights()[name].add_(0.5)
    trainer.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert torch.equal(other.weights()[name], trainer.weights()[name])
