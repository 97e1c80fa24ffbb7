"""The FP8 of a matrix by blocks in one pass over it, for GPUs: each program reads a block once and writes its codes.

It gives the bits of :func:`rollfeed.weights.serving.fp8.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _quantise_block(  # type: ignore[no-untyped-def]
    values,
    codes,
    scales,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    height: tl.constexpr,
    width: tl.constexpr,
    padded_height: tl.constexpr,
    padded_width: tl.constexpr,
    largest: tl.constexpr,
    smallest_amax: tl.constexpr,
):
    row, column = tl.arange(0, padded_height), tl.arange(0, padded_width)
    rows = tl.program_id(0) * height + row
    columns = tl.program_id(1) * width + column
    inside = ((row < height) & (rows < num_rows))[:, None] & ((column < width) & (columns < num_columns))[None, :]
    places = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    block = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    # A maximum would pass over what is no number.
    amax = tl.max(tl.max(tl.where(block == block, tl.abs(block), float("inf")), axis=1), axis=0)
    scale = tl.where(amax == 0.0, 1.0, tl.div_rn(tl.maximum(amax, smallest_amax), largest))
    stored = scale.to(scales.dtype.element_ty)
    inverse = tl.div_rn(1.0, stored.to(tl.float32))
    scaled = tl.minimum(tl.maximum(block * inverse, -largest), largest)
    written = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(codes + written, scaled.to(tl.float8e4nv), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), stored)


def quantise_blocks(
    tensor_RC: Tensor, block: tuple[int, int], *, scale_type: torch.dtype, largest: float, smallest_amax: float
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix, by blocks of ``block`` rows and columns."""
    (num_rows, num_columns), (height, width) = tensor_RC.shape, block
    num_A, num_B = triton.cdiv(num_rows, height), triton.cdiv(num_columns, width)
    codes_RC = torch.empty((num_rows, num_columns), dtype=torch.float8_e4m3fn, device=tensor_RC.device)
    scale_AB = torch.empty((num_A, num_B), dtype=scale_type, device=tensor_RC.device)
    kernel: Any = _quantise_block
    with torch.cuda.device(tensor_RC.device):  # Triton's is the current one, whatever it is given
        kernel[(num_A, num_B)](
            tensor_RC,
            codes_RC,
            scale_AB,
            num_rows,
            num_columns,
            *tensor_RC.stride(),
            height=height,
            width=width,
            padded_height=triton.next_power_of_2(height),
            padded_width=triton.next_power_of_2(width),
            largest=largest,
            smallest_amax=smallest_amax,
            num_warps=8,
        )
    return codes_RC, scale_AB
