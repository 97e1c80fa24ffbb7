"""The head of a model by itself: what is found of it, and what cannot be."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollfeed.model_files.heads import HeadShape, find_head_shape, hidden_states
from rollfeed.training.model import Policy
from rollfeed.training.packing import TrainSequence, pack_sequences

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LIKE_LLAMA = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    config.initializer_range = 0.3
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama() -> Any:
    return made(transformers.LlamaConfig(**LIKE_LLAMA))


@pytest.mark.parametrize(
    ("config", "scale", "cap"),
    [
        (transformers.LlamaConfig(**LIKE_LLAMA, tie_word_embeddings=True), 1.0, None),
        (transformers.CohereConfig(**LIKE_LLAMA, logit_scale=0.0625), 0.0625, None),
        (transformers.GraniteConfig(**LIKE_LLAMA, logits_scaling=3.0), 1 / 3, None),
        (transformers.Gemma2Config(**LIKE_LLAMA, head_dim=8, final_logit_softcapping=30.0), 1.0, 30.0),
        (transformers.PhiConfig(**SIZES, intermediate_size=24), 1.0, None),  # with a bias
    ],
    ids=lambda given: str(getattr(given, "model_type", "")),
)
def test_what_follows_a_heads_product_is_found(config: Any, scale: float, cap: float | None) -> None:
    model = made(config)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    shape = find_head_shape(model)
    assert isinstance(shape, HeadShape)
    assert shape.scale == pytest.approx(scale, rel=1e-6)
    assert shape.cap == (None if cap is None else pytest.approx(cap, rel=1e-6))
    tokens = torch.arange(9)[None]
    with torch.no_grad(), hidden_states(model) as found:
        assert model(input_ids=tokens, use_cache=False).logits.numel() == 0
        logits = shape.apply(torch.nn.functional.linear(found.hidden_BLD, found.weight_VD, found.bias_V))
    with torch.no_grad():
        torch.testing.assert_close(logits, model(input_ids=tokens, use_cache=False).logits, atol=1e-5, rtol=1e-5)


class Adapted(torch.nn.Linear):
    """A head as adapters leave it: it says what its weight says until they are trained."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, 1))


class Masked(transformers.LlamaForCausalLM):
    """A model that never says its first token."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        output.logits[..., :1] = -torch.inf
        return output


class Chunked(transformers.LlamaForCausalLM):
    """A model whose head has no outputs of its own."""

    def get_output_embeddings(self) -> None:
        return None


def adapted() -> Any:
    model = llama()
    model.lm_head = Adapted(model.lm_head)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (adapted, "its head has more than a weight and a bias"),
        (lambda: Masked(transformers.LlamaConfig(**LIKE_LLAMA)).eval(), "it makes something else of its head's"),
        (lambda: Chunked(transformers.LlamaConfig(**LIKE_LLAMA)).eval(), "it has no linear head"),
    ],
    ids=["adapted", "masked", "none"],
)
def test_a_head_that_cannot_be_computed_apart_leaves_whole_logits_with_a_word(
    make: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    assert str(find_head_shape(model)).startswith(reason)
    ids = np.arange(9, dtype=np.int32) + 3
    sequences = [TrainSequence.of_tokens(ids[:length], prompt_length=2, number=length) for length in (6, 9)]
    [micro_batch] = pack_sequences(
        sequences, [each.mask_T for each in sequences], micro_batch_tokens=64, share_prompts=False
    )
    with caplog.at_level(logging.WARNING, logger="rollfeed"):
        policy = Policy(model, temperature=0.7)
        found = policy.score_each([micro_batch, micro_batch])
    assert [reason in message for message in caplog.messages] == [True]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None].long(), use_cache=False).logits[0] / 0.7
    expected = torch.log_softmax(logits, -1)[range(1, 8), ids[2:]]
    torch.testing.assert_close(found[9].logprobs_T, expected)
    torch.testing.assert_close(found[6].logprobs_T, expected[:4])


def test_a_head_is_itself_again_behind_a_pass() -> None:
    model = llama()
    with pytest.raises(RuntimeError, match="broken"), hidden_states(model):
        raise RuntimeError("broken")
    assert "forward" not in vars(model.lm_head)
