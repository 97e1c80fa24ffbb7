"""FP8 with scales by block and by tensor."""

from __future__ import annotations

import pytest
import torch

from rollfeed.weights.serving.fp8 import dequantise, quantise, scale_shape

SHAPES = [(1, 1), (128, 128), (129, 127), (300, 200), (5, 1000), (64, 576)]


def random_matrix(shape: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    """Return values over many magnitudes, with whole rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    values[: shape[0] // 2] *= (torch.arange(shape[0] // 2) % 3 > 0)[:, None]
    return values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (1, 128), None])
def test_each_value_is_off_by_half_a_step_of_its_block_at_most(shape, block) -> None:
    values = random_matrix(shape)
    quantised = quantise(values, block)
    assert quantised.codes.shape == values.shape
    assert tuple(quantised.scale.shape) == scale_shape(shape, block)
    scales = dequantise(quantised._replace(codes=torch.ones_like(quantised.codes)), block)
    off = (dequantise(quantised, block) - values).abs()
    # Three bits of mantissa, and steps of 2 ** -9 near zero.
    assert bool((off <= torch.maximum(values.abs() / 16, scales * 2**-10) * 1.0001).all())


def test_the_largest_value_of_a_block_is_the_largest_of_fp8() -> None:
    values = torch.zeros(256, 128)
    values[3, 4], values[200, 9] = -8.96, 4.48
    codes, scale = quantise(values, (128, 128))
    assert codes.float().abs().amax() == 448
    torch.testing.assert_close(scale, torch.tensor([[0.02], [0.01]]))


@pytest.mark.parametrize("block", [(128, 128), None])
def test_zeros_have_a_scale_of_one(block) -> None:
    codes, scale = quantise(torch.zeros(130, 5), block)
    assert bool((codes.view(torch.uint8) == 0).all())
    assert bool((scale == 1).all())


@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e-13, 3e38])
def test_values_near_the_ends_of_fp32_are_finite(largest) -> None:
    values = torch.zeros(4, 4)
    values[1, 1] = largest
    quantised = quantise(values, (128, 128))
    assert bool(dequantise(quantised, (128, 128)).isfinite().all())
    assert bool(quantised.scale.isfinite().all())


def test_a_matrix_is_one_whatever_its_layout() -> None:
    values = random_matrix((300, 200))
    turned = quantise(values.T.contiguous().T, (128, 128))
    assert torch.equal(turned.codes.view(torch.uint8), quantise(values, (128, 128)).codes.view(torch.uint8))


def test_blocks_of_what_is_no_matrix_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks are of matrices"):
        scale_shape((2, 3, 4), (128, 128))
