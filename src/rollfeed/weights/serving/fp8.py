"""Matrices in FP8 (e4m3: 8 bits, largest value 448), each block or the whole tensor with a scale of its own.

A value is ``code * scale``. The scale of a block takes its largest absolute value to 448; where a block is all zeros it
is 1. As DeepGEMM and vLLM have it, values are multiplied by the reciprocal of the scale, and rounded to even.

Axes: R rows, C columns; A, B blocks of rows and of columns.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0
SMALLEST_AMAX = 1e-12
"""Below, the reciprocal of a scale would overflow."""
_LARGEST_BLOCK = 256 * 256
"""Values that a program on a GPU has at once."""

Block = tuple[int, int]


class Fp8Tensor(NamedTuple):
    """A tensor in FP8."""

    codes: Tensor
    """``float8_e4m3fn``, in the shape of the tensor."""
    scale: Tensor
    """What codes are multiplied by: ``(A, B)``, or one number."""


def scale_shape(shape: tuple[int, ...], block: Block | None) -> tuple[int, ...]:
    """Return how many blocks a matrix has; ``()`` where the whole tensor is one. Raises ValueError if it is none."""
    if block is None:
        return ()
    if len(shape) != 2:
        raise ValueError(f"its shape is {shape}, and blocks are of matrices")
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def quantise(tensor: Tensor, block: Block | None, *, scale_type: torch.dtype = torch.float32) -> Fp8Tensor:
    """Return a tensor in FP8, on its device; without ``block`` with one scale for all of it. GPUs do so in one pass.

    Codes are made with the scale as it is stored, in ``scale_type``. What is not finite has a scale that is not.
    """
    if is_fused(tensor, block):
        assert block is not None
        return fused([tensor], block, scale_type=scale_type)[0]
    return reference(tensor, block, scale_type=scale_type)


def is_fused(tensor: Tensor, block: Block | None) -> bool:
    """Whether :func:`fused` can take a tensor."""
    return block is not None and tensor.is_cuda and block[0] * block[1] <= _LARGEST_BLOCK and _has_triton()


def fused(tensors: Sequence[Tensor], block: Block, *, scale_type: torch.dtype = torch.float32) -> list[Fp8Tensor]:
    """Return what :func:`quantise` does of matrices of one type and device, by one launch of a kernel of Triton."""
    from rollfeed.weights.serving.fp8_kernel import quantise_blocks

    bounds = {"largest": LARGEST, "smallest_amax": SMALLEST_AMAX}
    return [Fp8Tensor(*each) for each in quantise_blocks(tensors, block, scale_type=scale_type, **bounds)]


def reference(tensor: Tensor, block: Block | None, *, scale_type: torch.dtype = torch.float32) -> Fp8Tensor:
    """Return what :func:`quantise` does, by plain operations of PyTorch on any device."""
    if block is None:
        codes_RC, scale_AB = _by_block(tensor.reshape(1, -1), (1, max(1, tensor.numel())), scale_type)
        return Fp8Tensor(codes_RC.reshape(tensor.shape), scale_AB.reshape(()))
    return Fp8Tensor(*_by_block(tensor, block, scale_type))


def dequantise(quantised: Fp8Tensor, block: Block | None) -> Tensor:
    """Return the values of a tensor in FP8, in fp32."""
    codes, scale = quantised.codes.float(), quantised.scale.float()
    if block is None:
        return codes * scale
    scale_RC = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes * scale_RC[: codes.shape[0], : codes.shape[1]]


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _by_block(tensor_RC: Tensor, block: Block, scale_type: torch.dtype) -> tuple[Tensor, Tensor]:
    (num_rows, num_columns), (height, width) = tensor_RC.shape, block
    num_A, num_B = scale_shape((num_rows, num_columns), block)
    padding = (0, num_B * width - num_columns, 0, num_A * height - num_rows)
    blocks = torch.nn.functional.pad(tensor_RC.float(), padding).reshape(num_A, height, num_B, width)
    amax_AB = blocks.abs().amax(dim=(1, 3))
    # GPUs would divide by a number as they multiply by its reciprocal, which rounds otherwise.
    largest = amax_AB.new_full((), LARGEST)
    scale_AB = torch.where(amax_AB == 0, 1.0, amax_AB.clamp(min=SMALLEST_AMAX) / largest).to(scale_type)
    inverse_AB = 1.0 / scale_AB.float()
    scaled = (blocks * inverse_AB[:, None, :, None]).clamp(-LARGEST, LARGEST)
    codes_RC = scaled.to(torch.float8_e4m3fn).reshape(num_A * height, num_B * width)[:num_rows, :num_columns]
    return codes_RC.contiguous(), scale_AB
