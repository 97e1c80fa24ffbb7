"""Log-probabilities of any causal model, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.config.train import Normalisation, TrainSettings
from rollfeed.errors import CheckpointError
from rollfeed.model_files.heads import find_head_shape, hidden_states
from rollfeed.training.losses import sequence_weights
from rollfeed.training.model import Policy, computing_options, enable_activation_checkpointing, load_policy_model
from rollfeed.training.packing import pack_sequences, split_into_minibatches
from rollfeed.training.sharing import longest_tree

CPU = torch.device("cpu")
SMALL = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "mistral": lambda: transformers.MistralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, sliding_window=4
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8, final_logit_softcapping=3.0
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=259,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "apertus": lambda: transformers.ApertusConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "mamba": lambda: transformers.MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, state_size=4),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "bloom": lambda: transformers.BloomConfig(vocab_size=259, hidden_size=32, n_layer=2, n_head=4),
}


@pytest.fixture(scope="session", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = CONFIGS[request.param]()
    config.initializer_range = 0.3
    folder = tmp_path_factory.mktemp(request.param) / request.param
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def micro_batches(batch: Any, *, share_prompts: bool) -> list[Any]:
    [sequences] = split_into_minibatches(batch, 1)
    weights = sequence_weights(sequences, normalisation=Normalisation.TOKEN, constant_length=None)
    return pack_sequences(sequences, weights, micro_batch_tokens=64, share_prompts=share_prompts)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_each_sequence_alone(checkpoint: Path, temperature: float, batch_by_seed) -> None:
    batch = batch_by_seed(3)
    policy = Policy(load_policy_model(checkpoint, device=CPU), temperature=temperature)
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    shares = longest_tree(policy, checkpoint=checkpoint, settings=TrainSettings()) > 0
    assert shares == (checkpoint.name not in ("mistral", "gpt_neo", "mamba", "bloom"))
    scale, cap = find_head_shape(policy.model)
    assert (scale, cap) == (pytest.approx(1.0, abs=1e-7), 3.0 if checkpoint.name == "gemma2" else None)
    for micro_batch in micro_batches(batch, share_prompts=shares):
        scored = policy.score(micro_batch)
        for number in np.unique(micro_batch.sequence_ids_T):
            sample = batch.samples[number]
            with torch.no_grad():
                logits = plain(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0] / temperature
            logprobs = torch.log_softmax(logits, dim=-1)[sample.prompt_length - 1 : -1]
            trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
            chosen = logprobs[trained, torch.from_numpy(sample.response_token_ids.astype(np.int64))[trained]]
            own = torch.from_numpy(micro_batch.sequence_ids_T == number)
            np.testing.assert_allclose(scored.logprobs_T.detach()[own], chosen, atol=1e-4)
            entropy = -(logprobs.exp() * logprobs).sum(-1)[trained]
            np.testing.assert_allclose(scored.entropy_T.detach()[own], entropy, atol=1e-4)


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_a_head_in_fp32_takes_what_passes_in_bf16_leave_to_it(precision: str, batch_by_seed) -> None:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(CONFIGS["llama"]()).eval()
    options = computing_options(TrainSettings(precision="bf16", head_precision=precision), CPU)
    policy = Policy(model, temperature=1.0, **options)
    [micro_batch, *_] = micro_batches(batch_by_seed(3), share_prompts=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), hidden_states(model) as found:
        model(input_ids=torch.from_numpy(micro_batch.token_ids_BL), use_cache=False)
    logits = found.hidden_BLD.float() @ model.lm_head.weight.detach().T
    logprobs = torch.log_softmax(logits[micro_batch.rows_T, micro_batch.columns_T], -1)
    expected = logprobs[range(len(logprobs)), micro_batch.targets_T]
    difference = (policy.score(micro_batch).logprobs_T.detach() - expected).abs().max()
    assert difference < 1e-5 if precision == "fp32" else 1e-5 < difference < 0.1


@pytest.mark.parametrize("computes_again", [False, True])
def test_a_pass_is_the_same_each_time(computes_again: bool, checkpoint: Path, batch_by_seed) -> None:
    policy = Policy(load_policy_model(checkpoint, device=CPU), temperature=1.0)
    if computes_again:
        enable_activation_checkpointing(policy.model)
    [micro_batch, *_] = micro_batches(batch_by_seed(3), share_prompts=False)
    first = policy.score(micro_batch).logprobs_T
    assert torch.equal(first, policy.score(micro_batch).logprobs_T)
    first.sum().backward()


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    for architectures in (["BertForMaskedLM"], None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": architectures}))
        with pytest.raises(CheckpointError, match="not a causal language model"):
            load_policy_model(tmp_path, device=CPU)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_policy_model(tmp_path / "nothing", device=CPU)


def test_a_checkpoint_without_all_weights_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load_policy_model(folder, device=CPU)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_policy_model(folder, device=CPU)
