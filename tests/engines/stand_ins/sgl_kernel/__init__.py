"""Compiled kernels, none of which a dense model on a CPU calls."""

from typing import Any, NoReturn

import torch

# Are looked up when what prepares pictures for Qwen's models is imported, which imports all of these.
_LOOKED_UP = (
    *("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
for _name in _LOOKED_UP:
    torch.library.define(f"sgl_kernel::{_name}", "(Tensor x) -> ()")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise RuntimeError(f"sgl_kernel.{name} was called; this server has no kernels")

    return kernel
