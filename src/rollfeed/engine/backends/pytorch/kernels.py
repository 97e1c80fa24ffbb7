"""The few operations that decide a step's speed and whether its rows depend on each other.

Axes: R rows (tokens of this step), I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rollfeed.engine.backends.architecture import Architecture

_TRANSPOSED_FROM_ROWS = 16
"""From here on a weight times transposed rows is the faster form on x86 (MKL)."""

_ROW_COUNTS = (1, 16, 32, 64, 128)


class RowKernels:
    """Operations of the forward pass, as fast as plain torch gets; last bits change with the number of rows."""

    def linear(self, rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return ``(R, O)``, possibly stored column by column."""
        if rows_RI.is_cuda or rows_RI.shape[0] < _TRANSPOSED_FROM_ROWS:
            return functional.linear(rows_RI, weight_OI, bias_O)
        outputs_RO = torch.mm(weight_OI, rows_RI.t()).t()
        return outputs_RO if bias_O is None else outputs_RO.add_(bias_O)

    def gate(self, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        return functional.silu(gate_RI).mul_(up_RI)

    def rms_norm(self, rows_RI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        """Return the rows over their root mean square, times the weight."""
        return functional.rms_norm(rows_RI, weight_I.shape, weight_I, eps)


class FixedKernels(RowKernels):
    """Every row comes out the same, bit by bit, wherever it stands and whatever stands beside it.

    Matrix products treat the rows of a small or odd-sized remainder differently; at least
    ``min_rows`` rows avoid that where :func:`rows_are_independent` holds. The activation is
    computed a row at a time, because vectorised loops take another exponential for their last
    few elements.
    """

    def __init__(self, *, min_rows: int) -> None:
        self.min_rows = min_rows

    def linear(self, rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        num_rows = rows_RI.shape[0]
        if num_rows < self.min_rows:
            rows_RI = functional.pad(rows_RI, (0, 0, 0, self.min_rows - num_rows))
        outputs_RO = functional.linear(rows_RI, weight_OI)[:num_rows]
        return outputs_RO if bias_O is None else outputs_RO + bias_O

    def gate(self, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        return torch.stack([functional.silu(row_I) for row_I in gate_RI]).mul_(up_RI)

    def rms_norm(self, rows_RI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(rows_RI.contiguous(), weight_I.shape, weight_I, eps)


class SingleRowKernels(RowKernels):
    """One row at a time: slow, and right on any machine."""

    def linear(self, rows_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return torch.cat([functional.linear(row_1I, weight_OI, bias_O) for row_1I in torch.split(rows_RI, 1)])

    def gate(self, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        return torch.stack([functional.silu(row_I) for row_I in gate_RI]).mul_(up_RI)

    def rms_norm(self, rows_RI: Tensor, weight_I: Tensor, eps: float) -> Tensor:
        return torch.cat([functional.rms_norm(row, weight_I.shape, weight_I, eps) for row in torch.split(rows_RI, 1)])


def choose_fixed_kernels(matrices: Sequence[Tensor], architecture: Architecture, *, num_rows: int) -> RowKernels:
    """Return the fastest kernels whose rows are independent on this machine, for steps of ``num_rows`` rows."""
    for min_rows in _ROW_COUNTS:
        kernels = FixedKernels(min_rows=min_rows)
        if rows_are_independent(kernels, matrices, architecture, num_rows=num_rows):
            return kernels
    return SingleRowKernels()


def rows_are_independent(
    kernels: RowKernels, matrices: Sequence[Tensor], architecture: Architecture, *, num_rows: int
) -> bool:
    """Try whether a row's result depends on its position or its neighbours, for a model's matrices."""

    def linear(weight_OI: Tensor, rows_RI: Tensor) -> Tensor:
        return kernels.linear(rows_RI, weight_OI, None)

    def normalised(rows_RI: Tensor) -> Tensor:
        return kernels.rms_norm(rows_RI, torch.ones(rows_RI.shape[1]), architecture.rms_norm_eps)

    def gated(rows_RI: Tensor) -> Tensor:
        return kernels.gate(rows_RI, rows_RI)

    operations: list[tuple[int, Callable[[Tensor], Tensor]]] = [
        (architecture.intermediate_size, gated),
        (architecture.hidden_size, normalised),
        (architecture.head_dim, normalised),
    ]
    for weight_OI in matrices:
        operations.append((weight_OI.shape[1], partial(linear, weight_OI)))
    return all(_rows_agree(operation, num_rows, width) for width, operation in operations)


def _rows_agree(operation: Callable[[Tensor], Tensor], num_rows: int, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    mixed_RI = torch.randn(num_rows, width, generator=generator)
    row = num_rows // 2
    equal = operation(mixed_RI[row].repeat(num_rows, 1))
    return torch.equal(equal, equal[:1].expand_as(equal)) and torch.equal(operation(mixed_RI)[row], equal[0])
