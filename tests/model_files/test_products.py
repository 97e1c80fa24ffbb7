"""Products by oneDNN are those of PyTorch's own library, their gradients too, and are made where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rollfeed.model_files.products import add_product, is_onednn_faster, product, wide_products

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not is_onednn_faster(), reason="oneDNN is no faster on this processor")


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def matrix(rows: int, columns: int, *, transposed: bool = False) -> Tensor:
    return torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(400, 96, 600), (600, 400, 96), (7, 9, 5)])
def test_a_product_is_that_of_its_factors_in_any_order_of_memory(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    rows, inner, columns = sizes
    first = matrix(rows, inner, transposed=transposed[0])
    second = matrix(inner, columns, transposed=transposed[1])
    expected = first.double() @ second.double()
    assert_close(product(first, second), expected)
    total = torch.ones(rows, columns)
    add_product(total, first, second)
    assert_close(total, expected + 1.0)


@pytest.mark.parametrize("learns", ["inputs", "weight", "both"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_has_the_values_and_gradients_that_it_has_alone(learns: str, with_bias: bool) -> None:
    inputs, weight = torch.randn(3, 200, 128), torch.randn(256, 128)
    bias = torch.randn(256) if with_bias else None
    weights = torch.randn(3, 200, 256)

    def passed() -> list[Tensor]:
        own = [each.clone() for each in (inputs, weight, bias) if each is not None]
        own[0].requires_grad_(learns != "weight")
        for each in own[1:]:
            each.requires_grad_(learns != "inputs")
        outputs = linear(*own)
        (outputs * weights).sum().backward()  # type: ignore[no-untyped-call]
        return [outputs.detach(), *(each.grad for each in own if each.grad is not None)]

    expected = passed()
    with wide_products(CPU):
        found = passed()
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert_close(own, other)


@needs_onednn
def test_large_layers_of_fp32_are_computed_by_onednn_and_small_ones_are_not() -> None:
    def made_by(num_rows: int, dtype: torch.dtype = torch.float32) -> str:
        inputs, weight = (torch.randn(rows, 128, dtype=dtype, requires_grad=True) for rows in (num_rows, 256))
        return type(linear(inputs, weight).grad_fn).__name__

    plain = made_by(600)
    with wide_products(CPU):
        assert made_by(600) != plain
        assert made_by(8) == plain
        assert made_by(600, torch.float64) == plain
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert made_by(600) == plain
    assert made_by(600) == plain


@needs_onednn
def test_a_frozen_layer_keeps_none_of_its_inputs() -> None:
    inputs, weight = torch.randn(3, 200, 128, requires_grad=True), torch.randn(256, 128)
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with wide_products(CPU), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(inputs, weight)
        assert kept == [(256, 128)]
        linear(inputs.detach(), weight.requires_grad_())
        assert kept == [(256, 128), (3, 200, 128)]


def test_products_of_the_same_matrices_are_the_same_to_the_bit() -> None:
    first, second = torch.randn(700, 200), torch.randn(200, 300)
    assert torch.equal(product(first, second), product(first.clone(), second.clone()))
