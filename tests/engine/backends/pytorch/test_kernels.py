"""Torch kernels whose rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.pytorch.kernels import (
    FixedKernels,
    SingleRowKernels,
    choose_fixed_kernels,
    rows_are_independent,
)
from rollfeed.engine.backends.pytorch.model import TorchWeights


def make_weights(architecture: Architecture) -> TorchWeights:
    weights = TorchWeights(architecture, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.by_name.values():
        tensor.normal_(generator=generator)
    return weights


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 11, 32])
def test_the_chosen_kernels_compute_rows_independently(num_rows: int) -> None:
    architecture = Architecture.from_config(
        {
            "model_type": "llama",
            "vocab_size": 301,
            "hidden_size": 52,
            "intermediate_size": 91,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
    )
    weights = make_weights(architecture)
    kernels = choose_fixed_kernels(weights.matrices, architecture, num_rows=num_rows)
    assert isinstance(kernels, FixedKernels)
    assert rows_are_independent(kernels, weights.matrices, architecture, num_rows=num_rows)
    assert rows_are_independent(SingleRowKernels(), weights.matrices, architecture, num_rows=num_rows)
    rows = torch.randn(num_rows, 52, generator=torch.Generator().manual_seed(1))
    layer = weights.layers[0]
    for other in (kernels, SingleRowKernels()):
        torch.testing.assert_close(other.linear(rows, layer.qkv, None), rows @ layer.qkv.t())
