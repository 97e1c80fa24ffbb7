"""Compares FP8 with what other programs make of the same matrices: ``python fp8_elsewhere.py triton|vllm|sglang``.

Triton's kernel is run by its interpreter (``TRITON_INTERPRET=1``), on a CPU; vLLM's and SGLang's are the functions with
which these servers make FP8 of a checkpoint. Runs in their environments, and prints how many matrices were compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from rollfeed.weights.serving.fp8 import fused, reference

SHAPES = [(1, 1), (129, 127), (200, 150), (5, 300), (64, 192)]
BLOCKS = [(128, 128), (64, 64), (96, 32)]
LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda values: values,
    lambda values: values.bfloat16(),
    lambda values: values * 1e-30,
    lambda values: values * 1e30,
    lambda values: values.T.contiguous().T,
]


def random_matrix(shape: tuple[int, int], *, seed: int) -> torch.Tensor:
    """Return values over many magnitudes, with rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    values[: shape[0] // 2] *= (torch.arange(shape[0] // 2) % 3 > 0)[:, None]
    return values


def are_equal(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether codes and scales are equal bit by bit."""
    codes = torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    return codes and torch.equal(found[1].flatten(), expected[1].flatten())


def round_in_the_interpreter() -> None:
    """Have Triton's interpreter cast to fewer bits as GPUs do: it does not round to even."""
    from triton import language as tl
    from triton.runtime import interpreter

    plain: Any = interpreter._convert_float
    types = {tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.uint16)}

    def cast(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given != tl.float32 or wanted not in types:
            return plain(values, given, wanted, rounding)
        of_torch, bits = types[wanted]
        return torch.as_tensor(values).to(of_torch).view(bits).numpy()

    interpreter._convert_float = cast


def compare_with_triton() -> int:
    round_in_the_interpreter()
    compared = 0
    for seed, shape in enumerate(SHAPES):
        for block in BLOCKS:
            for layout in LAYOUTS:
                values = layout(random_matrix(shape, seed=seed))
                for scale_type in (torch.float32, torch.bfloat16):
                    found = fused(values, block, scale_type=scale_type)
                    assert are_equal(found, reference(values, block, scale_type=scale_type)), (shape, block, scale_type)
                    compared += 1
    for bad in (float("nan"), float("inf"), float("-inf")):
        values = torch.ones(200, 200)
        values[150, 3] = bad
        assert fused(values, (128, 128)).scale.isfinite().tolist() == [[True, True], [False, True]]
    return compared


def compare_with_vllm() -> int:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    for seed, shape in enumerate(SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            values = random_matrix(shape, seed=seed).to(dtype)
            assert are_equal(per_block_cast_to_fp8(values, [64, 64]), reference(values, (64, 64))), shape
    return 2 * len(SHAPES)


def compare_with_sglang() -> int:
    from sglang.srt.layers.quantization.fp8_utils import input_to_float8

    for seed, shape in enumerate(SHAPES):
        values = random_matrix(shape, seed=seed).bfloat16()
        (codes, scale), expected = input_to_float8(values), reference(values, None)
        torch.testing.assert_close(scale, expected.scale, rtol=3e-7, atol=0.0)
        # It rounds the reciprocal of the scale: a value halfway between two codes may become the other one.
        away = (codes.view(torch.int8).short() - expected.codes.view(torch.int8).short()).abs()
        assert away.max() <= 1, shape
        assert away.float().mean() <= 0.01, shape
    return len(SHAPES)


if __name__ == "__main__":
    name = sys.argv[1]
    found = {"triton": compare_with_triton, "vllm": compare_with_vllm, "sglang": compare_with_sglang}[name]()
    print(f"{found} matrices")
