"""Measures how far a real SGLang and the trainer are apart on a mixture of experts, with and without routing replay.

A Qwen3-MoE of random weights is made on the spot, of deviation 1 over the root of the hidden size, so that it matters
which experts are chosen. SGLang answers in bf16 and returns the experts; the trainer computes with the same weights in
bf16 and in fp32. Figures are those of ``bench/routing_replay.py``::

    python bench/gpu/routing_replay_sglang.py --sglang /venvs/sglang/bin/python --output FILE

``--device cpu --shape small --engine embedded`` is for a try without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sglang import machine
from train_ranks import make_tokenizer, server

sys.path.append(str(Path(__file__).parents[1]))
from routing_replay import answers, compared, embedded

from rollfeed.config.engine import SGLangSettings
from rollfeed.engine.client import ServerEngine
from rollfeed.engine.dialects import SGLang
from rollfeed.prompts.tokenizer import load_tokenizer

_NAMES = ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "head_dim")
SHAPES: dict[str, dict[str, int]] = {
    "small": dict(zip(_NAMES, (64, 2, 8, 2, 32), strict=True)),
    "large": dict(zip(_NAMES, (1024, 16, 64, 8, 128), strict=True)),
}


def make_model(folder: Path, shape: dict[str, int]) -> int:
    """Write the checkpoint in bf16, and return how many parameters it has."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_tokenizer(folder)
    hidden = shape["hidden_size"]
    config = Qwen3MoeConfig(
        **shape, vocab_size=512, intermediate_size=2 * hidden, moe_intermediate_size=hidden // 2,
        num_attention_heads=hidden // shape["head_dim"], num_key_value_heads=2, norm_topk_prob=True,
        max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=hidden**-0.5, eos_token_id=2,
        bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def release_of(python: str) -> str:
    """Return the release of SGLang in an environment."""
    code = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def served(address: str, folder: Path) -> ServerEngine:
    """Return SGLang as the engine."""
    settings = SGLangSettings(workers=(address,), concurrency=64)
    return ServerEngine(SGLang(settings), context_length=1024, tokenizer=load_tokenizer(folder))


def main() -> None:
    """Make the model, have it answer, and write what trainers say of the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="train.device")
    parser.add_argument("--shape", choices=list(SHAPES), default="large")
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--sglang", default=sys.executable, help="Python of an environment with SGLang")
    parser.add_argument("--server-gpu", default="0", help="CUDA_VISIBLE_DEVICES of the server")
    parser.add_argument("--memory", type=float, default=0.25, help="--mem-fraction-static of the server")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.flags = ["--enable-return-routed-experts"]
    release = {} if arguments.engine == "embedded" else {"sglang": release_of(arguments.sglang)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine() | release,
            "parameters": make_model(folder, SHAPES[arguments.shape]),
        }
        with server(folder.parent, arguments) as address:
            engine = embedded(folder) if address is None else served(address, folder)
            samples = answers(engine, num_prompts=arguments.prompts, length=arguments.length)
        result |= compared(folder, samples, device=arguments.device)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
