"""The native forward pass: its rows, its cache and its weights.

Axes: R rows, N slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.native.model import NativeModel, quantised_refusal
from rollfeed.engine.backends.native.places import NativeWeights
from rollfeed.engine.backends.native.places import quantised as quantised_weight

VOCAB = 300
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
}
ARCHITECTURE = Architecture.from_config(CONFIG)
Make = Callable[..., tuple[NativeModel, NativeWeights]]


def random_weights(architecture: Architecture, weights: NativeWeights) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in weights.shapes.items():
        tensors[name] = torch.randn(shape, generator=generator) * 0.1
        if "norm" in name:
            tensors[name] += 1.0
    return tensors


@pytest.fixture
def make() -> Iterator[Make]:
    models = []

    def make(architecture: Architecture = ARCHITECTURE, **changes: Any) -> tuple[NativeModel, NativeWeights]:
        options: dict[str, Any] = {"num_slots": 4, "capacity": 64, "max_rows": 32, "max_threads": 2}
        model = NativeModel(architecture, **{**options, **changes})
        models.append(model)
        weights = NativeWeights(model, architecture)
        weights.load(random_weights(architecture, weights), complete=True)
        return model, weights

    yield make
    for model in models:
        model.close()


def rows(*spans: tuple[int, int, int]) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Return tokens, positions and slots of spans (slot, start, end); a slot's tokens depend on slot and position."""
    slots = np.concatenate([np.full(end - start, slot) for slot, start, end in spans]).astype(np.int32)
    positions = np.concatenate([np.arange(start, end) for _, start, end in spans]).astype(np.int32)
    return [((slots * 71 + positions * 37) % VOCAB).astype(np.int32), positions, slots]


def test_a_prompt_in_pieces_beside_others_gives_the_bits_of_the_whole_alone(make: Make) -> None:
    model, _ = make()
    alone = model.forward(*rows((1, 0, 23)))
    whole = model.logits(alone).clone()
    model.erase(1)
    pieces = [
        model.forward(*rows((0, 0, 3), (1, 0, 9)))[3:],
        model.forward(*rows((1, 9, 10), (3, 0, 17)))[:1],
        model.forward(*rows((0, 3, 4), (2, 0, 5), (1, 10, 23)))[6:],
    ]
    assert torch.equal(model.logits(torch.cat(pieces)), whole)


def test_a_pass_of_more_rows_than_there_is_room_for_is_cut(make: Make) -> None:
    model, _ = make()
    whole = model.forward(*rows((0, 0, 60)))
    model.erase(0)
    parts = [model.forward(*rows((0, start, start + 20))) for start in (0, 20, 40)]
    assert torch.equal(whole, torch.cat(parts))


def test_copied_positions_are_as_good_as_computed_ones(make: Make) -> None:
    model, _ = make()
    model.forward(*rows((1, 0, 21)))
    model.copy_positions(1, 2, 0, 21)
    tokens, positions, _ = rows((1, 21, 25))
    computed = model.forward(tokens, positions, np.full(4, 1, np.int32))
    copied = model.forward(tokens, positions, np.full(4, 2, np.int32))
    assert torch.equal(computed, copied)


def test_the_number_of_threads_changes_no_bit(make: Make) -> None:
    model, _ = make(max_threads=4)
    results = []
    for threads in (1, 2, 4):
        model.set_threads(threads)
        model.erase(0)
        results.append(model.forward(*rows((0, 0, 30))))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("quantised", [False, True])
def test_weights_are_read_back_as_they_were_written(quantised: bool, make: Make) -> None:
    _, weights = make(quantised=quantised)
    for name, written in random_weights(ARCHITECTURE, weights).items():
        read = weights.read(name)
        assert read is not None
        exact = not quantised or written.dim() == 1 or "embed" in name
        # A group's largest weight has the code 63; others are rounded to the nearest code.
        atol = 0.0 if exact else float(written.abs().max()) / 63 / 2 * 1.001
        torch.testing.assert_close(read, written, rtol=0.0, atol=atol)
        torch.testing.assert_close(read, written if exact else quantised_weight(written), rtol=1e-6, atol=0.0)
    assert weights.read("nothing") is None


def test_products_with_quantised_weights_are_those_of_the_codes(make: Make) -> None:
    """The head alone, against the same quantisation in float64."""
    model, weights = make(quantised=True)
    hidden = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    norm, head = weights.read("model.norm.weight"), weights.read("lm_head.weight")
    assert norm is not None
    assert head is not None
    normed = (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * norm).reshape(7, 3, 32)
    scale = normed.abs().amax(-1, keepdim=True) / 127
    expected = ((normed / scale).round() * scale).reshape(7, 96).double() @ head.double().t()
    # A value near the middle of two codes may be rounded to either.
    difference = (model.logits(hidden) - expected).abs()
    assert difference.median() < 1e-5
    assert difference.max() < 0.05


def test_a_quantised_model_stays_close_to_the_exact_one(make: Make) -> None:
    exact, _ = make()
    quantised, _ = make(quantised=True)
    expected = exact.logits(exact.forward(*rows((0, 0, 30))))
    logits = quantised.logits(quantised.forward(*rows((0, 0, 30))))
    assert torch.corrcoef(torch.stack([expected.flatten(), logits.flatten()]))[0, 1] > 0.999


def test_widths_that_cannot_be_quantised_have_a_reason() -> None:
    odd = Architecture.from_config({**CONFIG, "intermediate_size": 150})
    assert quantised_refusal(odd) == "a layer has 150 inputs, which is not a multiple of 32"
    assert quantised_refusal(ARCHITECTURE) is None


def test_the_time_of_each_part_is_told_once(make: Make) -> None:
    model, _ = make()
    model.forward(*rows((0, 0, 30)))
    taken = model.take_milliseconds()
    assert taken["attention"] > 0
    assert taken["head"] == 0
    assert set(model.take_milliseconds().values()) == {0.0}
