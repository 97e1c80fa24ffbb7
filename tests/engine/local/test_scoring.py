"""What the embedded engine says of given texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.protocols import Engine
from rollfeed.types import TensorUpdate

TEXTS = [np.arange(5, 45, dtype=np.int32), np.array([7, 9], np.int32), np.arange(60, 90, dtype=np.int32)]


def expected(model: Any) -> np.ndarray:
    with torch.no_grad():
        logprobs = [model(torch.tensor(text[None].astype(np.int64))).logits[0].log_softmax(-1) for text in TEXTS]
    return np.concatenate(
        [rows[np.arange(len(text) - 1), text[1:]].numpy() for rows, text in zip(logprobs, TEXTS, strict=True)]
    )


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_texts_are_scored_with_the_weights_of_the_moment(
    kernels: str, make_tiny_engine: Callable[..., Engine], load_reference: Any, tiny_llama: Path, perturbed: Any
) -> None:
    model = load_reference(tiny_llama)
    async with make_tiny_engine(kernels=kernels) as engine:
        for version in range(1, 3):
            (scored,) = (await engine.score(TEXTS)).values()
            np.testing.assert_allclose(scored, expected(model), atol=1e-4)
            tensors = perturbed(model)
            await engine.apply(TensorUpdate(tensors, policy_version=version))
            model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)


async def test_a_model_that_transformers_computes_scores_too(save_tiny: Any, make_tiny_engine: Any) -> None:
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=256, eos_token_id=3)
    folder = save_tiny(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    async with make_tiny_engine(checkpoint=folder) as engine:
        (scored,) = (await engine.score(TEXTS)).values()
    np.testing.assert_allclose(scored, expected(model), atol=1e-4)


async def test_a_paused_engine_says_nothing(make_tiny_engine: Callable[..., Engine]) -> None:
    async with make_tiny_engine() as engine:
        await engine.pause()
        async with asyncio.timeout(10):
            assert await engine.score(TEXTS) == {}
        await engine.resume()
        assert await engine.score(TEXTS) != {}
