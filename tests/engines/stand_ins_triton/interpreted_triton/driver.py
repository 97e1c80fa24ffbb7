"""The half of the backend that would run kernels."""

from typing import Any

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Says that it is there."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        return lambda call, *, quantiles, **_: [0.0 for _ in quantiles]
