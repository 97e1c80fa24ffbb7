"""Models whose words depend on more than what is before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from rollfeed.model_files.trial import refusal_of_model

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    config.initializer_range = 0.2
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZES, intermediate_size=48),
        transformers.MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, sliding_window=8),
        transformers.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4),
        transformers.BertConfig(**SIZES, intermediate_size=48, is_decoder=True),
        transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=8),  # short of positions
    ],
    ids=lambda config: str(config.model_type),
)
def test_a_causal_model_is_taken(config: Any) -> None:
    assert refusal_of_model(made(config), generates=True) is None


def test_a_model_that_sees_what_comes_later_is_refused() -> None:
    refusal = refusal_of_model(made(transformers.BertConfig(**SIZES, intermediate_size=48)), generates=False)
    assert refusal is not None
    assert refusal.startswith("it is not causal")
    assert refusal.endswith("(is_decoder is false)")


def test_a_model_that_is_another_each_time_is_refused() -> None:
    model = made(transformers.LlamaConfig(**SIZES, intermediate_size=48, attention_dropout=0.5)).train()
    assert refusal_of_model(model, generates=False) == "it says something else of one text each time"


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_a_batch_is_tried_once_more_before_a_model_is_refused_for_it(num_wrong: int) -> None:
    model = made(transformers.LlamaConfig(**SIZES, intermediate_size=48))
    whole, batches = model.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        if len(output.logits) == 2 and not output.past_key_values:
            batches.append(output)
            if len(batches) <= num_wrong:
                output.logits = output.logits.roll(1, dims=-1)
        return output

    model.forward = forward
    refusal = refusal_of_model(model, generates=True)
    assert refusal == (None if num_wrong == 1 else "what it says of a text depends on the other texts of a batch")


def test_a_model_that_computes_differently_token_by_token_is_refused() -> None:
    model = made(transformers.LlamaConfig(**SIZES, intermediate_size=48))
    whole = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        if output.logits.shape[1] == 1:
            output.logits = output.logits.roll(1, dims=-1)
        return output

    model.forward = forward
    assert refusal_of_model(model, generates=False) is None
    refusal = refusal_of_model(model, generates=True)
    assert refusal is not None
    assert refusal.startswith("token by token it says something else")


def test_a_model_that_changes_its_weights_is_refused() -> None:
    model = made(transformers.RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=3, rescale_every=1))
    assert refusal_of_model(model, generates=False) == "it changes its own weights when it computes"


def test_a_model_that_wants_more_than_tokens_is_refused() -> None:
    model = made(transformers.LlamaConfig(**SIZES, intermediate_size=48))

    def forward(*, input_ids: Any, use_cache: bool) -> Any:
        raise ValueError("where are the pictures?\nIt needs some.")

    model.forward = forward
    assert refusal_of_model(model, generates=False) == "it does not run on tokens alone (where are the pictures?)"
