"""Every supported kind of model against transformers' own forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from rollfeed.engine.backends.architecture import unsupported_reason
from rollfeed.protocols import Engine
from rollfeed.types import Completion, SamplingParams

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama_tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama_head_dim": lambda: transformers.LlamaConfig(**SIZES, head_dim=16),
    "llama_all_heads_own_keys": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama_linear_rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}
    ),
    "llama_llama3_rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_equal_transformers(
    name: str,
    kernels: str,
    save_tiny: Callable[[Any], Path],
    make_tiny_engine: Callable[..., Engine],
    load_reference: Callable[[Path], Any],
    reference_logprobs: Callable[..., Any],
) -> None:
    folder = save_tiny(CONFIGS[name]())
    # Longer than one chunk of prefill, with a common beginning and one prompt of a single token.
    common = np.random.default_rng(0).integers(0, 128, 280).astype(np.int32)
    prompts = [common, common, np.append(common[:100], np.int32(5)), common[:1], common[:20]]

    async def main() -> list[Completion]:
        async with make_tiny_engine(checkpoint=folder, context_length=400, kernels=kernels) as engine:
            params = [SamplingParams(max_new_tokens=20, seed=seed) for seed in range(len(prompts))]
            return await asyncio.gather(
                *(engine.generate(prompt, each, request_id="r") for prompt, each in zip(prompts, params, strict=True))
            )

    completions = asyncio.run(main())
    expected = reference_logprobs(load_reference(folder), prompts, completions)
    for logprobs, completion in zip(expected, completions, strict=True):
        assert len(completion.token_ids) > 0
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "activation is 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "only a part"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"model_type": "mistral", "sliding_window": 100}, "slides over 100 tokens"),
        ({"model_type": "mistral"}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "slides over 64 tokens"),
        ({"model_type": "qwen2", "sliding_window": 64}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
    ],
)
def test_what_the_engine_does_not_compute_itself_has_a_reason(changes: dict[str, Any], words: str | None) -> None:
    reason = unsupported_reason({"model_type": "llama", **changes}, context_length=512)
    assert reason is None if words is None else reason is not None and words in reason
