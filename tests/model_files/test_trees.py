"""Rows with branches, attended to block by block, beside a mask over whole rows and sequences alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention.bias import CausalVariant

from rollfeed.config.train import TrainSettings
from rollfeed.model_files.trees import Tree, attend_in_blocks, trees_of
from rollfeed.training.model import Policy, prepare_passes
from rollfeed.training.packing import MicroBatch, TrainSequence, pack_sequences
from rollfeed.training.sharing import refusal_to_share

LIKE_LLAMA: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**LIKE_LLAMA),
    "qwen3": transformers.Qwen3Config(**LIKE_LLAMA, head_dim=8),
    "gpt2": transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4),
}


def made(config: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config.initializer_range = 0.3
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


EVEN, UNEVEN = (9, 4, 1, 6), (20, 2, 1, 2)
"""Lengths of responses that a CPU attends to at once, and one by one."""


def trees(first: tuple[int, ...] = EVEN, *, share_prompts: bool = True) -> list[MicroBatch]:
    """Return two prompts with responses of several lengths, and one with a response alone."""
    generator = np.random.default_rng(3)
    sequences = []
    for family, (prompt_length, lengths) in enumerate(((7, first), (3, (5, 12)), (11, (3,)))):
        prompt = generator.integers(0, 61, prompt_length)
        for length in lengths:
            ids = np.concatenate([prompt, generator.integers(0, 61, length)]).astype(np.int32)
            number = len(sequences)
            sequences.append(TrainSequence.of_tokens(ids, prompt_length=prompt_length, number=number, family=family))
    return pack_sequences(
        sequences,
        [each.mask_T for each in sequences],
        micro_batch_tokens=128 if share_prompts else 30,
        share_prompts=share_prompts,
        longest_tree=40,
    )


def test_trees_are_read_from_the_numbers_of_their_branches_and_the_places_at_which_they_begin() -> None:
    branches = np.array([0, 0, 1, 1, 1, 2, 0, 1, 2, 2, 3, 3, 3, 0, 0, 0, 0, 1], np.int32)
    positions = np.array([0, 1, 2, 3, 4, 2, 0, 1, 1, 2, 1, 2, 3, 0, 1, 2, 0, 1], np.int64)
    assert trees_of(branches, positions) == (
        Tree(0, 2, ((2, 5), (5, 6))),
        Tree(6, 7, ((7, 8), (8, 10), (10, 13))),
        Tree(13, 16, ()),
        Tree(16, 17, ((17, 18),)),
    )


@pytest.mark.parametrize(
    ("lengths", "has_mask"), [(EVEN, True), (UNEVEN, True), (EVEN, False)], ids=["even", "uneven", "as on a GPU"]
)
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=["kept", "computed again"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_blocks_have_the_values_and_gradients_of_sequences_alone(
    config: Any, settings: dict[str, Any], lengths: tuple[int, ...], has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollfeed.model_files.trees._has_mask", lambda query: has_mask)

    def score(policy: Policy, passes: list[MicroBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight_of = torch.linspace(-1, 2, 97)
        policy.model.zero_grad()
        found = {}
        for micro_batch in passes:
            scored = policy.score(micro_batch)
            numbers = torch.from_numpy(micro_batch.sequence_ids_T)
            (scored.logprobs_T * weight_of[numbers]).sum().backward()
            found |= {int(number): scored.logprobs_T.detach()[numbers == number] for number in numbers.unique()}
        gradients = {name: each.grad.clone() for name, each in policy.model.named_parameters()}
        return torch.cat([found[number] for number in sorted(found)]), gradients

    alone = Policy(made(config), temperature=0.8)
    expected, gradients = score(alone, trees(lengths, share_prompts=False))
    policy = Policy(made(config), temperature=0.8)
    prepare_passes(policy, TrainSettings(**settings))
    [packed] = trees(lengths)
    assert packed.branches_BL is not None
    policy.attends_in_blocks = attend_in_blocks(policy.model)
    assert policy.attends_in_blocks
    found, own = score(policy, [packed])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
    # Rows without branches are computed as before.
    torch.testing.assert_close(score(policy, trees(lengths, share_prompts=False))[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_mask", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_passes_in_bf16_attend_in_bf16(config: Any, has_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollfeed.model_files.trees._has_mask", lambda query: has_mask)
    config.initializer_range = 0.1
    policies = [Policy(made(config), temperature=1.0, autocast=dtype) for dtype in (None, torch.bfloat16)]
    [packed] = trees()
    for policy in policies:
        policy.attends_in_blocks = attend_in_blocks(policy.model)
    exact, found = (policy.score_each([packed]) for policy in policies)
    for number, scored in found.items():
        torch.testing.assert_close(scored.logprobs_T, exact[number].logprobs_T, atol=0.3, rtol=0.0)


@pytest.mark.parametrize(("lengths", "first"), [(EVEN, {(3, 8, 15)}), (UNEVEN, {(1, 19, 26), (1, 1, 8)})])
def test_no_mask_over_a_row_is_made(
    lengths: tuple[int, ...], first: set[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(made(CONFIGS["llama"]), temperature=1.0)
    policy.attends_in_blocks = attend_in_blocks(policy.model)
    kernel = torch.nn.functional.scaled_dot_product_attention
    seen = set()

    def watch(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.add((query.shape[0], query.shape[2], key.shape[2]))
        return kernel(query, key, value, **options)

    monkeypatch.setattr("rollfeed.model_files.trees.scaled_dot_product_attention", watch)
    policy.score_each(trees(lengths))
    # Prompts see themselves; what a response of 9 tokens to a prompt of 7 sees are both, but for its last token.
    assert seen == {(1, 7, 7), (1, 3, 3), (1, 11, 11), *first, (2, 11, 14), (1, 2, 13)}


def test_a_gpu_has_no_mask_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(made(CONFIGS["llama"]), temperature=1.0)
    policy.attends_in_blocks = attend_in_blocks(policy.model)
    monkeypatch.setattr("rollfeed.model_files.trees._has_mask", lambda query: False)
    kernel = torch.nn.functional.scaled_dot_product_attention
    seen = set()

    def watch(query: Any, key: Any, value: Any, *, attn_mask: Any, is_causal: bool, **options: Any) -> Any:
        assert is_causal is (attn_mask is None)
        if not is_causal:
            assert (attn_mask.seq_len_q, attn_mask.seq_len_kv) == (query.shape[2], key.shape[2])
            assert attn_mask.variant is CausalVariant.LOWER_RIGHT
        seen.add((query.shape[0], query.shape[2], key.shape[2]))
        return kernel(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr("rollfeed.model_files.trees.scaled_dot_product_attention", watch)
    policy.score_each(trees())
    # A response of one token has no place of its own: nothing is predicted from it.
    responses = {(1, 8, 15), (1, 3, 10), (1, 5, 12), (1, 4, 7), (1, 11, 14), (1, 2, 13)}
    assert seen == {(1, 7, 7), (1, 3, 3), (1, 11, 11), *responses}


def test_a_mask_keeps_trees_of_one_row_apart() -> None:
    policy = Policy(made(CONFIGS["llama"]), temperature=1.0)
    [packed] = trees()
    behind = packed.without_padding()
    assert behind.token_ids_BL.shape == (1, packed.num_inputs)
    assert bool(behind.token_mask.all())
    expected, found = (policy.score_each([each]) for each in (packed, behind))
    for number, scored in found.items():
        torch.testing.assert_close(scored.logprobs_T, expected[number].logprobs_T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [64, 1500])
def test_rows_that_are_longer_than_a_mask_may_be_are_tried(length: int) -> None:
    policy = Policy(made(CONFIGS["llama"]), temperature=1.0)
    policy.attends_in_blocks = attend_in_blocks(policy.model)
    assert refusal_to_share(policy, longest=length) is None


def test_models_with_attention_of_their_own_are_left_alone() -> None:
    model = made(CONFIGS["llama"], attn_implementation="eager")
    assert not attend_in_blocks(model)
    assert model.config._attn_implementation == "eager"
