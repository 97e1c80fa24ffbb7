"""The FP8 of matrices by blocks in one pass over them, for GPUs: each program reads a block once and writes its codes.

Many matrices go in one launch, which takes longer than most of them do. The bits are those of
:func:`rollfeed.weights.serving.fp8.reference`.

Axes: M matrices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _quantise_block(  # type: ignore[no-untyped-def]
    table,
    num_matrices,
    padded_matrices: tl.constexpr,
    is_even: tl.constexpr,
    value_type: tl.constexpr,
    scale_type: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    padded_height: tl.constexpr,
    padded_width: tl.constexpr,
    largest: tl.constexpr,
    smallest_amax: tl.constexpr,
):
    numbers = tl.arange(0, padded_matrices)
    first_programs = tl.load(table + numbers * 8 + 7, mask=numbers < num_matrices, other=1 << 40)
    matrix = table + (tl.sum((first_programs <= tl.program_id(0)).to(tl.int32)) - 1) * 8
    values = tl.load(matrix).to(tl.pointer_type(value_type))
    codes = tl.load(matrix + 1).to(tl.pointer_type(tl.float8e4nv))
    scales = tl.load(matrix + 2).to(tl.pointer_type(scale_type))
    num_rows, num_columns = tl.load(matrix + 3), tl.load(matrix + 4)
    row_stride, column_stride = tl.load(matrix + 5), tl.load(matrix + 6)
    number = tl.program_id(0) - tl.load(matrix + 7)
    if is_even:  # what the compiler is not told of numbers in a table, and needs for wide loads
        column_stride = 1
        values, codes = tl.multiple_of(values, 16), tl.multiple_of(codes, 16)
        row_stride, num_columns = tl.multiple_of(row_stride, 16), tl.multiple_of(num_columns, 16)
    num_across = tl.cdiv(num_columns, width)
    row, column = tl.arange(0, padded_height), tl.arange(0, padded_width)
    rows = number // num_across * height + row
    columns = number % num_across * width + column
    inside = ((row < height) & (rows < num_rows))[:, None] & ((column < width) & (columns < num_columns))[None, :]
    places = rows[:, None] * row_stride + columns[None, :] * column_stride
    block = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    # A maximum would pass over what is no number.
    amax = tl.max(tl.max(tl.where(block == block, tl.abs(block), float("inf")), axis=1), axis=0)
    scale = tl.where(amax == 0.0, 1.0, tl.div_rn(tl.maximum(amax, smallest_amax), largest))
    stored = scale.to(scale_type)
    inverse = tl.div_rn(1.0, stored.to(tl.float32))
    scaled = tl.minimum(tl.maximum(block * inverse, -largest), largest)
    tl.store(codes + rows[:, None] * num_columns + columns[None, :], scaled.to(tl.float8e4nv), mask=inside)
    tl.store(scales + number, stored)


def quantise_blocks(
    matrices: Sequence[Tensor],
    block: tuple[int, int],
    *,
    scale_type: torch.dtype,
    largest: float,
    smallest_amax: float,
) -> list[tuple[Tensor, Tensor]]:
    """Return codes and scales of matrices of one type on one device, by blocks of ``block`` rows and columns."""
    (height, width), device = block, matrices[0].device
    found, rows_M8, num_programs = [], [], 0
    for matrix in matrices:
        num_rows, num_columns = matrix.shape
        num_A, num_B = -(-num_rows // height), -(-num_columns // width)
        codes_RC = torch.empty((num_rows, num_columns), dtype=torch.float8_e4m3fn, device=device)
        scale_AB = torch.empty((num_A, num_B), dtype=scale_type, device=device)
        places = (matrix.data_ptr(), codes_RC.data_ptr(), scale_AB.data_ptr())
        rows_M8.append((*places, num_rows, num_columns, *matrix.stride(), num_programs))
        num_programs += num_A * num_B
        found.append((codes_RC, scale_AB))
    if num_programs == 0:
        return found
    kernel: Any = _quantise_block
    # Triton's device is the current one, whatever it is given.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        table_M8 = torch.tensor(rows_M8, dtype=torch.int64).to(device, non_blocking=True)
        kernel[(num_programs,)](
            table_M8,
            len(matrices),
            padded_matrices=triton.next_power_of_2(len(matrices)),
            is_even=all(map(_is_even, matrices)),
            value_type=_TYPES[matrices[0].dtype],
            scale_type=_TYPES[scale_type],
            height=height,
            width=width,
            padded_height=triton.next_power_of_2(height),
            padded_width=triton.next_power_of_2(width),
            largest=largest,
            smallest_amax=smallest_amax,
            num_warps=8,
        )
    return found


def _is_even(matrix: Tensor) -> bool:
    """Whether rows are stored one after another, and each begins where 16 values or bytes do."""
    row_stride, column_stride = matrix.stride()
    return column_stride == 1 and row_stride % 16 == matrix.shape[1] % 16 == matrix.data_ptr() % 16 == 0


_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
