"""Tries causal language models of transformers, tiny and with random weights, as policies: one line of JSON each.

``python architectures.py FOLDER MODEL_TYPE...``, where FOLDER is empty. Each is tried in a process of its own, because
some end it. What is tried: `rollfeed check`, then answers of the embedded engine against what the trainer says of them,
with and without shared prompts, before and after an update that is published, then the folder that is written.

Axes: R response tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rollfeed import app
from rollfeed.cli.main import main as rollfeed
from rollfeed.config import RunSpec
from rollfeed.config.train import TrainSettings
from rollfeed.training.trainer import Trainer
from rollfeed.types import (
    Group,
    Prompt,
    Rollout,
    Sample,
    SampleStatus,
    SamplingParams,
    TensorUpdate,
    TrainBatch,
    VersionSpan,
)
from rollfeed.weights import write_checkpoint

TOLERANCE = 1e-4
CONTEXT = 128
LIMIT_SECONDS = 120
LIMIT_BYTES = 8 << 30
PROMPT_LENGTHS = (21, 45)
RESPONSE_LENGTH = 24
NUM_MEMBERS = 3
"""Answers to each prompt."""

SMALL: dict[str, Any] = dict(
    vocab_size=320,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "embedding_size"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"], 128),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 512),
    num_key_value_heads=2,
    head_dim=16,
    # Experts.
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    moe_shared_expert_intermediate_size=32,
    # Windows that the prompts are longer than.
    **dict.fromkeys(["sliding_window", "window_size", "attention_window_size", "attention_chunk_size"], 8),
    index_topk=CONTEXT,
    # Low-rank, linear and indexed attention, state spaces.
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=4,
    index_head_dim=16,
    index_n_heads=4,
    mamba_d_state=8,
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    state_size=8,
    ssm_state_size=8,
    vocab_size_per_layer_input=320,
    hidden_size_per_layer_input=16,
)
"""Values by the name of a configuration's field, where it has it."""
HEADS = {"num_key_value_heads": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"shared_experts_intermediate_size": 32, "per_layer_config": {}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "intermediate_size": [128] * 4,
        "laurel_rank": 8,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "inkling2_loop_text": {"unpadded_vocab_size": 320},
    "inkling2_text": {"unpadded_vocab_size": 320},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "longcat_flash": {
        "head_dim": 8,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": CONTEXT,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "ple_embed_dim": 32,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "xlstm": {"embedding_dim": 64, "num_blocks": 2, "chunk_size": 8},
    # With one, transformers sets its row to zero at every loading, trained or not.
    "youtu": {"pad_token_id": None},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_dt_rank": 8,
        **HEADS,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "chunk_size": 8,
        "n_mamba_heads": 8,
        **HEADS,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""More of them, by model type."""

SETTINGS = """
[model]
checkpoint = "model"
[[prompts.datasets]]
path = "data.jsonl"
label_key = "label"
[prompts]
rollout_max_prompt_len = 64
[rollout]
num_rollout = 1
rollout_batch_size = 2
n_samples_per_prompt = 3
[sampling]
rollout_max_response_len = 40
[engine]
threads = 1
num_slots = 8
context_length = 128
[reward]
rm_type = "math"
[train]
threads = 1
device = "cpu"
"""


class NotMadeError(Exception):
    """There is no tiny model of this type."""


def make_config(model_type: str) -> Any:
    return make_config_of(CONFIG_MAPPING[model_type])


def make_config_of(kind: Any) -> Any:
    model_type = kind.model_type
    fields = inspect.signature(kind.__init__).parameters
    values = {name: value for name, value in SMALL.items() if name in fields}
    if "kv_lora_rank" in fields:  # all heads have keys of their own
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, part in kind.sub_configs.items():
        default = part if getattr(part, "model_type", "") else type(getattr(kind(), name))
        if default is not type(None):
            values[name] = make_config_of(default)
    if "layer_types" in fields and "layer_types" not in SPECIAL.get(model_type, {}):
        kinds = list(dict.fromkeys(kind().layer_types or []))
        if kinds:  # one layer of each kind
            values["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
            values["num_hidden_layers"] = len(values["layer_types"])
    return kind(**{**values, **SPECIAL.get(model_type, {})})


def make_model(model_type: str, folder: Path) -> None:
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(make_config(model_type))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.08)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.02)
            for name, buffer in model.named_buffers():
                if "bias" in name and buffer.is_floating_point() and buffer.numel() < 64:
                    buffer.normal_(0, 0.02)
        model.save_pretrained(folder)
    except Exception as error:
        raise NotMadeError(describe(error)) from error


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What is 3 plus 4? The answer is 7."] * 20, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def refusal() -> str | None:
    """Return what `rollfeed check` complains of, in the folder that is the present one."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = rollfeed(["check", "run.toml"])
    return said.getvalue().strip().splitlines()[-1] if code else None


async def answer(engine: Any, version: int) -> list[Group]:
    random = np.random.default_rng(version)
    groups = []
    for group_index, length in enumerate(PROMPT_LENGTHS):
        prompt_ids = random.integers(3, 300, length).astype(np.int32)
        prompt = Prompt(prompt_id=str(group_index), source="made", text="", token_ids=prompt_ids)
        numbers = [group_index * NUM_MEMBERS + member for member in range(NUM_MEMBERS)]
        completions = await asyncio.gather(
            *(
                engine.generate(
                    prompt_ids,
                    SamplingParams(max_new_tokens=RESPONSE_LENGTH - 4 * (number % 3), seed=number),
                    request_id=str(number),
                )
                for number in numbers
            )
        )
        samples = [
            sample_of(prompt_ids, completion, group_index, number, version)
            for number, completion in zip(numbers, completions, strict=True)
        ]
        rollouts = tuple(Rollout(rollout_id=sample.rollout_id, samples=(sample,)) for sample in samples)
        groups.append(Group(group_index=group_index, prompt=prompt, rollouts=rollouts))
    return groups


def sample_of(prompt_ids: Any, completion: Any, group_index: int, number: int, version: int) -> Sample:
    length = len(completion.token_ids)
    return Sample(
        token_ids=np.concatenate([prompt_ids, completion.token_ids]),
        response_length=length,
        loss_mask=np.ones(length, np.float32),
        logprobs=np.asarray(completion.logprobs, np.float32),
        version_spans=(VersionSpan(0, length, version),),
        status=SampleStatus.COMPLETED,
        group_index=group_index,
        index=number,
        rollout_id=number,
        reward=float(number % 2),
    )


def difference(trainer: Trainer, groups: list[Group]) -> float:
    samples = [rollout.samples[0] for group in groups for rollout in group.rollouts]
    found = trainer.logprobs(samples)
    return max(float(np.abs(own_R - sample.logprobs).max()) for own_R, sample in zip(found, samples, strict=True))


async def compare(folder: Path) -> dict[str, Any]:
    """Return the largest differences, by what is compared."""
    settings = RunSpec.load(folder / "run.toml").settings
    model = app.load_model(str(folder / "model"))
    shared, apart = (
        Trainer(
            model.checkpoint,
            settings=TrainSettings(threads=1, device="cpu", share_prompts=share, optimizer={"learning_rate": 1e-3}),
            temperature=1.0,
            num_batches=1,
            max_response_length=RESPONSE_LENGTH,
        )
        for share in (True, False)
    )
    found: dict[str, Any] = {"shares": shared.shares_prompts}
    async with app.build_engine(model, settings.engine) as engine:
        groups = await answer(engine, 0)
        found |= {"shared": difference(shared, groups), "apart": difference(apart, groups)}
        advantages = np.tile(np.array([1.0, -1.0, 0.5], np.float32), len(groups))
        batch = TrainBatch(step=0, policy_version=0, groups=tuple(groups), advantages_S=advantages, metrics={})
        before = {name: tensor.clone() for name, tensor in shared.weights().items()}
        shared.train_step(batch)
        apart.load_state_dict(shared.state_dict())
        found["changed"] = sum(not torch.equal(tensor, before[name]) for name, tensor in shared.weights().items())
        await engine.apply(TensorUpdate(shared.weights(), policy_version=1))
        groups = await answer(engine, 1)
        found |= {"shared, updated": difference(shared, groups), "apart, updated": difference(apart, groups)}
    return found | compare_folder(folder, apart)


def compare_folder(folder: Path, trainer: Trainer) -> dict[str, Any]:
    write_checkpoint(trainer.weights(), folder / "written", checkpoint=folder / "model")
    names = [set(tensor_names(path)) for path in (folder / "model", folder / "written")]
    token_ids = torch.arange(5, 35)[None]
    loader: Any = AutoModelForCausalLM
    written, found = loader.from_pretrained(folder / "written", dtype=torch.float32, output_loading_info=True)
    with torch.no_grad():
        own, other = (model.eval()(token_ids).logits for model in (trainer.policy.model, written))
    return {
        "names": sorted(names[0] ^ names[1])[:4],
        "not loaded": sorted(found["unexpected_keys"])[:4],
        "written": float((own - other).abs().max()),
    }


def tensor_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    return [name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()]  # noqa: SIM118


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(lines)[:160]
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"


def examine(model_type: str, folder: Path) -> dict[str, Any]:
    (folder / "run.toml").write_text(SETTINGS)
    (folder / "data.jsonl").write_text('{"prompt": "What is 1+1?", "label": "2"}\n' * 4)
    os.chdir(folder)
    try:
        make_model(model_type, folder / "model")
    except NotMadeError as error:
        return {"outcome": "not made", "reason": str(error)}
    make_tokenizer(folder / "model")
    refused = refusal()
    if refused is not None:
        return {"outcome": "refused", "reason": refused}
    try:
        found = asyncio.run(compare(folder))
    except Exception as error:
        return {"outcome": "wrong", "reason": describe(error)}
    differences = {name: value for name, value in found.items() if isinstance(value, float)}
    off = {name: value for name, value in differences.items() if not value <= TOLERANCE}
    if off or found["names"] or found["not loaded"] or not found["changed"]:
        return {"outcome": "wrong", "reason": json.dumps(found)}
    return {"outcome": "agrees", "largest": max(differences.values()), "shares": found["shares"]}


def examine_apart(model_type: str, folder: Path) -> dict[str, Any]:
    """Return what :func:`examine` does in a process of its own."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        signal.alarm(LIMIT_SECONDS)
        found = {"outcome": "wrong", "reason": "it ended without a word"}
        try:
            found = examine(model_type, folder)
        except BaseException as error:
            found = {"outcome": "wrong", "reason": describe(error)}
        finally:
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer_file:
        text = answer_file.read()
    _, status = os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    found = json.loads(text) if text else {"outcome": "wrong", "reason": f"its process ended with status {status}"}
    return {"model_type": model_type, **found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for model_type in sys.argv[2:]:
        print(json.dumps(examine_apart(model_type, folder / model_type)), flush=True)


if __name__ == "__main__":
    main()
