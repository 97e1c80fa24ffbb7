"""SmolLM2-135M-Instruct against transformers: the log-probabilities that training relies on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from rollfeed.prompts.tokenizer import LocalTokenizer
from rollfeed.protocols import Engine
from rollfeed.types import Completion, FinishKind, FinishReason, SamplingParams, TensorUpdate

pytestmark = pytest.mark.model

Prompt = NDArray[np.int32]
Logprobs = Callable[[Any, Sequence[Prompt], Sequence[Completion]], list[NDArray[np.float32]]]
END_OF_TURN = 2


async def generate(engine: Engine, prompts: list[Prompt], *, max_new_tokens: int) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(prompt, SamplingParams(max_new_tokens=max_new_tokens, seed=seed), request_id=str(seed))
            for seed, prompt in enumerate(prompts)
        )
    )


async def test_the_greedy_answer_is_right(
    smollm2_engine: Engine, smollm2_tokenizer: LocalTokenizer, smollm2_prompts: list[Prompt]
) -> None:
    greedy = SamplingParams(max_new_tokens=32, temperature=0.0)
    completion = await smollm2_engine.generate(smollm2_prompts[0], greedy, request_id="r")
    assert completion.text == "The capital of France is Paris.<|im_end|>"
    assert completion.finish_reason == FinishReason(FinishKind.STOP, END_OF_TURN)
    assert completion.token_ids[-1] == END_OF_TURN


@pytest.mark.parametrize("batch_size", [1, 7, 32])
async def test_logprobs_equal_a_forward_pass_over_the_final_tokens(
    batch_size: int,
    smollm2_engine: Engine,
    smollm2_reference: Any,
    smollm2_prompts: list[Prompt],
    reference_logprobs: Logprobs,
) -> None:
    prompts = [smollm2_prompts[number % 4] for number in range(batch_size)]
    completions = await generate(smollm2_engine, prompts, max_new_tokens=10)
    expected = reference_logprobs(smollm2_reference, prompts, completions)
    for completion, logprobs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)


async def test_logprobs_are_exact_after_an_abort_and_resume(
    smollm2_engine: Engine, smollm2_reference: Any, smollm2_prompts: list[Prompt], reference_logprobs: Logprobs
) -> None:
    params = SamplingParams(max_new_tokens=200, seed=1, min_new_tokens=200)
    task = asyncio.create_task(smollm2_engine.generate(smollm2_prompts[1], params, request_id="long"))
    await smollm2_engine.generate(smollm2_prompts[2], SamplingParams(max_new_tokens=8, seed=3), request_id="short")
    await smollm2_engine.abort("long")
    partial = await task
    assert partial.finish_reason.kind is FinishKind.ABORT
    assert len(partial.token_ids) > 0
    prompt = np.concatenate([smollm2_prompts[1], partial.token_ids])
    resumed = await smollm2_engine.generate(prompt, SamplingParams(max_new_tokens=8, seed=2), request_id="long")
    assert resumed.cached_tokens == len(prompt) - 1
    (expected,) = reference_logprobs(smollm2_reference, [prompt], [resumed])
    np.testing.assert_allclose(resumed.logprobs, expected, atol=1e-4)


async def test_logprobs_are_exact_after_a_weight_update(
    smollm2_engine: Engine,
    smollm2_reference: Any,
    smollm2_prompts: list[Prompt],
    reference_logprobs: Logprobs,
    perturbed: Callable[[Any], dict[str, NDArray[np.float32]]],
) -> None:
    original = {name: tensor.clone() for name, tensor in smollm2_reference.state_dict().items()}
    changed = perturbed(smollm2_reference)
    version = smollm2_engine.policy_version
    before = await generate(smollm2_engine, smollm2_prompts[:2], max_new_tokens=8)
    try:
        smollm2_reference.load_state_dict({name: torch.from_numpy(changed[name]) for name in changed}, strict=False)
        await smollm2_engine.apply(TensorUpdate(changed, policy_version=version + 1))
        after = await generate(smollm2_engine, smollm2_prompts[:2], max_new_tokens=8)
        expected = reference_logprobs(smollm2_reference, smollm2_prompts[:2], after)
        for completion, logprobs in zip(after, expected, strict=True):
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
            assert completion.version_spans[0].policy_version == version + 1
    finally:
        smollm2_reference.load_state_dict(original)
        await smollm2_engine.apply(TensorUpdate(original, policy_version=version + 2))
    restored = await generate(smollm2_engine, smollm2_prompts[:2], max_new_tokens=8)
    for first, last in zip(before, restored, strict=True):
        assert first.token_ids.tolist() == last.token_ids.tolist()


async def test_first_tokens_come_as_often_as_the_model_says(
    smollm2_engine: Engine, smollm2_reference: Any, smollm2_prompts: list[Prompt]
) -> None:
    num_draws = 768
    completions = await generate(smollm2_engine, [smollm2_prompts[1]] * num_draws, max_new_tokens=1)
    with torch.no_grad():
        logits = smollm2_reference(torch.from_numpy(smollm2_prompts[1].astype(np.int64))[None]).logits[0, -1]
    expected = logits.double().softmax(dim=-1).numpy() * num_draws
    observed = np.bincount([int(completion.token_ids[0]) for completion in completions], minlength=len(expected))
    often = expected >= 5
    assert often.sum() >= 5
    pooled_expected = np.append(expected[often], expected[~often].sum())
    pooled_observed = np.append(observed[often], observed[~often].sum())
    assert chisquare(pooled_observed, pooled_expected).pvalue > 1e-3


async def test_a_stop_string_over_several_tokens_ends_the_answer(
    smollm2_engine: Engine, smollm2_prompts: list[Prompt]
) -> None:
    greedy = SamplingParams(max_new_tokens=32, temperature=0.0, stop=("of Fran",))
    completion = await smollm2_engine.generate(smollm2_prompts[0], greedy, request_id="r")
    assert completion.text == "The capital of Fran"
    assert completion.finish_reason == FinishReason(FinishKind.STOP, "of Fran")
    assert len(completion.token_ids) == 4


async def test_special_tokens_are_left_out_of_the_text_on_request(
    smollm2_engine: Engine, smollm2_prompts: list[Prompt]
) -> None:
    greedy = SamplingParams(max_new_tokens=32, temperature=0.0, skip_special_tokens=True)
    completion = await smollm2_engine.generate(smollm2_prompts[0], greedy, request_id="r")
    assert completion.text == "The capital of France is Paris."
    assert completion.token_ids[-1] == END_OF_TURN


async def test_min_new_tokens_holds_the_end_back(smollm2_engine: Engine, smollm2_prompts: list[Prompt]) -> None:
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0, min_new_tokens=12)
    completion = await smollm2_engine.generate(smollm2_prompts[0], greedy, request_id="r")
    assert len(completion.token_ids) == 12
    assert END_OF_TURN not in completion.token_ids
