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
from rollfeed.types import SamplingParams, TensorUpdate

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
        async with asyncio.timeout(60):
            assert await engine.score(TEXTS) == {}
        await engine.resume()
        assert await engine.score(TEXTS) != {}


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_what_is_sampled_meanwhile_is_what_would_be_sampled_otherwise(
    kernels: str, make_tiny_engine: Callable[..., Engine]
) -> None:
    params = SamplingParams(max_new_tokens=60, min_new_tokens=60, seed=5)
    async with make_tiny_engine(kernels=kernels) as engine:
        alone = await engine.generate(TEXTS[0], params, request_id="alone")
        beside = asyncio.ensure_future(engine.generate(TEXTS[0], params, request_id="beside"))
        while not beside.done():
            await engine.score(TEXTS)
        np.testing.assert_array_equal((await beside).token_ids, alone.token_ids)
        np.testing.assert_allclose((await beside).logprobs, alone.logprobs, atol=1e-4)


@pytest.mark.parametrize("kernels", ["native", "torch"])
async def test_texts_are_scored_as_they_were_sampled_at_a_temperature(
    kernels: str, make_tiny_engine: Callable[..., Any]
) -> None:
    params = SamplingParams(max_new_tokens=12, seed=5, temperature=0.5)
    async with make_tiny_engine(kernels=kernels) as engine:
        reply = await engine.generate(TEXTS[0], params, request_id="a")
        scored = await engine.score_tempered([np.concatenate([TEXTS[0], reply.token_ids])], 0.5)
        np.testing.assert_allclose(scored[-len(reply.token_ids) :], reply.logprobs, atol=1e-4)
