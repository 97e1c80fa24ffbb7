"""The same protocol in deterministic mode, and over a model that runs through transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

PROMPT = np.random.default_rng(0).integers(3, 250, 150).tolist()


@pytest.fixture(scope="session")
def tiny_gpt2(save_tiny: Callable[[Any], Path]) -> Path:
    return save_tiny(
        transformers.GPT2Config(
            vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
        )
    )


def scores(reply: Any) -> list[float]:
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


def expected_scores(model: Any) -> list[float]:
    logits = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    values: list[float] = logits[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].tolist()
    return values


async def test_prompts_are_scored_in_deterministic_mode(
    serving: Any, load_reference: Any, tiny_checkpoint: Path
) -> None:
    async with serving(deterministic=True) as client:
        replies = [await client.generate(PROMPT, max_new_tokens=num, top={"logprob_start_len": 0}) for num in (0, 3, 0)]
    for reply in replies:
        assert scores(reply) == pytest.approx(expected_scores(load_reference(tiny_checkpoint)), abs=1e-4)


async def test_prompts_are_scored_through_transformers(
    serving: Any, load_reference: Any, tiny_gpt2: Path, tiny_checkpoint: Path
) -> None:
    async with serving(checkpoint=tiny_gpt2, tokenizer_folder=tiny_checkpoint) as client:
        zero, some = await asyncio.gather(
            client.generate(PROMPT, max_new_tokens=0, top={"logprob_start_len": 0}),
            client.generate(PROMPT, max_new_tokens=5, ignore_eos=True, top={"logprob_start_len": 100}),
        )
        lone = await client.generate(PROMPT[:1], max_new_tokens=0, top={"logprob_start_len": 0})
    expected = expected_scores(load_reference(tiny_gpt2))
    assert scores(zero) == pytest.approx(expected, abs=1e-4)
    assert scores(some) == pytest.approx(expected[100:], abs=1e-4)
    assert len(some["output_ids"]) == 5
    assert lone["meta_info"]["input_token_logprobs"] == [[None, PROMPT[0], None]]


async def test_streams_aborts_and_weights_go_through_transformers(
    serving: Any, device: Any, tiny_gpt2: Path, tiny_checkpoint: Path
) -> None:
    async with serving(checkpoint=tiny_gpt2, tokenizer_folder=tiny_checkpoint, context_length=512) as client:
        sampling = {"max_new_tokens": 6, "ignore_eos": True}
        events = await client.events("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
        device.slow_down()
        asked = asyncio.ensure_future(client.generate(PROMPT, max_new_tokens=300, ignore_eos=True))
        await client.until(lambda load: load["num_used_tokens"] > len(PROMPT))
        await client.post("/pause_generation", {"mode": "retract"})
        await client.post("/update_weights_from_disk", {"model_path": str(tiny_gpt2), "weight_version": "3"})
        await client.post("/continue_generation", {})
        await client.post("/abort_request", {"abort_all": True})
        reply = await asked
        rows = await client.post("/get_weights_by_name", {"name": "transformer.ln_f.weight", "truncate_size": 2})
    assert len(events[-1]["output_ids"]) == 6
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(rows) == 2
