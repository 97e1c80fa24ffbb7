"""Products of matrices on a CPU, by the faster of the two libraries that PyTorch brings.

It gives products of fp32 to MKL, which on processors of AMD computes with half of the width of AVX-512. oneDNN computes
with all of it, and takes about half of the time for products of the same precision; for small ones it is not worth
getting ready.

Axes: N rows, I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_LEAST_PRODUCTS = 1 << 24
"""Multiplications from which oneDNN pays."""
_TOLERANCE = 1e-5
_CPU_INFO = Path("/proc/cpuinfo")


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product of two matrices; it has no gradient, and its memory any order."""
    if not _pays(first, second, second.shape[1]):
        return first @ second
    # The first factor is copied unless its rows lie in memory one after another.
    if first.is_contiguous() or first.numel() <= second.numel():
        return _by_onednn(first, second.t())
    return _by_onednn(second.t(), first).t()


def add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add the product of two matrices to what is there."""
    if _pays(first, second, second.shape[1]):
        total += product(first, second)
    else:
        total.addmm_(first, second)


def wide_products(device: torch.device) -> AbstractContextManager[Any]:
    """Have linear layers that are called within be computed by :func:`product`, on the way back as well."""
    return _WideProducts() if device.type == "cpu" and is_onednn_faster() else nullcontext()


class _WideProducts(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is linear and not kwargs and _takes(*args):
            return _Linear.apply(*args, *[None] * (3 - len(args)))  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # Each is for the gradient of the other.
        needs_inputs, needs_weight, _ = context.needs_input_grad
        context.save_for_backward(inputs if needs_weight else None, weight_OI if needs_inputs else None)
        return _by_onednn(inputs, weight_OI, bias_O)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_OI = context.saved_tensors
        needs_inputs, needs_weight, needs_bias = context.needs_input_grad
        gradient_NO = gradients[0].flatten(0, -2)
        return (
            product(gradient_NO, weight_OI).view(*gradients[0].shape[:-1], -1) if needs_inputs else None,
            product(gradient_NO.t(), inputs.flatten(0, -2)) if needs_weight else None,
            gradient_NO.sum(dim=0) if needs_bias else None,
        )


def _takes(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> bool:
    return (
        not torch.compiler.is_compiling()
        and inputs.ndim >= 2
        and not torch.is_autocast_enabled("cpu")
        and type(weight_OI) in (Tensor, torch.nn.Parameter)
        and _pays(inputs, weight_OI, weight_OI.shape[0])
    )


def _pays(first: Tensor, second: Tensor, width: int) -> bool:
    return (
        first.device.type == second.device.type == "cpu"
        and first.dtype == second.dtype == torch.float32
        and first.numel() * width >= _LEAST_PRODUCTS
        and is_onednn_faster()
    )


@cache
def is_onednn_faster() -> bool:
    """Return whether this machine computes large products by oneDNN; it gives the same values."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        if "AuthenticAMD" not in _CPU_INFO.read_text(encoding="utf-8", errors="replace"):
            return False
        first, second = (torch.linspace(-1.0, 1.0, 64 * 48).roll(shift).view(64, 48) for shift in (0, 700))
        expected = first.double() @ second.double().t()
        return bool((_by_onednn(first, second) - expected).abs().max() <= _TOLERANCE * expected.abs().max())
    except (OSError, AttributeError, RuntimeError):  # a release of PyTorch that has no such product
        return False


def _by_onednn(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight_OI, bias_O, "none", [], "")
    return outputs
