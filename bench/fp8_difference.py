"""How far log-probabilities in FP8 are from those in bf16, emulated on a CPU: weights alone, and inputs of layers too.

::

    python bench/fp8_difference.py --output bench/fp8_difference.json

The model answers questions of an environment in bf16. Linear layers then compute with weights that were FP8 (e4m3, by
blocks), in fp32 with results in bf16, as kernels of servers do; with inputs that were FP8, too, each token by groups of
a block's width.

Axes: B texts, L tokens of each, N sampled tokens of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollfeed
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.model_files.loading import load_causal_model
from rollfeed.weights.serving.fp8 import Block, dequantise, quantise

NUM_TEXTS, NEW_TOKENS = 16, 128
Values = torch.Tensor


def main() -> None:
    """Read the arguments, sample, score in each way, and write the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as model.checkpoint")
    parser.add_argument("--block", type=int, default=64, help="rows and columns of a block")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    block: Block = (arguments.block, arguments.block)
    prompts_BL = asyncio.run(questions(arguments.model))
    model = load_causal_model(resolve_checkpoint(arguments.model), dtype=torch.bfloat16)
    with torch.no_grad():
        tokens_BL = sampled(model, prompts_BL)
        bf16_N = scored(model, tokens_BL)
        ways: dict[str, Callable[[], Any]] = {
            "fp32": lambda: model.float(),
            "by block, weights": lambda: emulate(model, block, inputs=False),
            "by block, weights and inputs": lambda: emulate(model, block, inputs=True),
            "by tensor, weights": lambda: emulate(model, None, inputs=False),
        }
        found = {name: differences(scored_after(model, tokens_BL, way) - bf16_N) for name, way in ways.items()}
    result = {
        "command": " ".join(["python", *sys.argv]),
        "block": arguments.block,
        "num_tokens": len(bf16_N),
        "difference_to_bf16_in_nats_a_token": found,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


async def questions(name: str) -> torch.Tensor:
    """Return prompts of one length, ``(B, L)``."""
    tokenizer = rollfeed.load_model(name).tokenizer
    source = rollfeed.environment_source("core/compare_max", level=1, seed=0, tokenizer=tokenizer)
    drawn = [prompt.token_ids for prompt in await source.draw(20 * NUM_TEXTS)]
    ((length, _),) = Counter(map(len, drawn)).most_common(1)
    return torch.tensor(np.stack([each for each in drawn if len(each) == length][:NUM_TEXTS]), dtype=torch.int64)


def sampled(model: Any, prompts_BL: torch.Tensor) -> torch.Tensor:
    """Return prompts and what the model says to them, ``(B, L)``; ends of answers are no ends here."""
    tokens_BL, cache, given = prompts_BL, None, prompts_BL
    for _ in range(NEW_TOKENS):
        reply = model(given, past_key_values=cache, use_cache=True)
        cache = reply.past_key_values
        reply.logits[:, -1, model.config.eos_token_id] = -torch.inf
        given = torch.multinomial(reply.logits[:, -1].float().softmax(-1), 1)
        tokens_BL = torch.cat([tokens_BL, given], 1)
    return tokens_BL


def scored(model: Any, tokens_BL: torch.Tensor) -> np.ndarray:
    """Return the log-probabilities of the sampled tokens, ``(N,)``."""
    logits = model(tokens_BL).logits[:, -NEW_TOKENS - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, tokens_BL[:, -NEW_TOKENS:, None]).flatten().double().numpy()


def scored_after(model: Any, tokens_BL: torch.Tensor, change: Callable[[], Any]) -> np.ndarray:
    """Return what a changed model says, and change it back."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change()
    found = scored(model, tokens_BL)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    model.bfloat16().load_state_dict(kept)
    return found


def emulate(model: Any, block: Block | None, *, inputs: bool) -> None:
    """Have all linear layers but the output head compute with weights, and perhaps inputs, that were FP8."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            weight = dequantise(quantise(module.weight.data, block), block)
            module.forward = forward_of(weight, block if inputs else None)


def forward_of(weight: Values, block: Block | None) -> Callable[[Values], Values]:
    """Return what a layer does; ``block`` rounds its inputs, each token by groups of its width."""

    def forward(values: Values) -> Values:
        if block is None:
            rounded = values.float()
        else:
            group = (1, block[1])
            flat = values.reshape(-1, values.shape[-1])
            rounded = dequantise(quantise(flat, group), group).reshape(values.shape)
        return (rounded @ weight.T).to(values.dtype)

    return forward


def differences(difference_N: np.ndarray) -> dict[str, float]:
    """Return their size in a few numbers."""
    absolute_N = np.abs(difference_N)
    found = {"mean": absolute_N.mean(), "p99": np.quantile(absolute_N, 0.99), "signed": difference_N.mean()}
    return {name: round(float(value), 4) for name, value in found.items()}


if __name__ == "__main__":
    main()
