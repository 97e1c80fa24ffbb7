"""How fast a GPU makes FP8 of the matrices of Qwen3-1.7B's shape, and of a large one, beside a copy of them.

::

    python bench/gpu/fp8_cast.py --output bench/gpu/fp8_cast.json

``kernel`` is the time that the GPU spends on the launches; ``together`` what passes, the host's part included, which
has to make two tensors of each matrix. The bits are compared with those of the plain operations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang import machine
from torch.profiler import ProfilerActivity, profile

from rollfeed.weights.serving.fp8 import fused, reference

HIDDEN, FFN, LAYERS = 2048, 6144, 28
BLOCK = (128, 128)
TOGETHER = 32
"""Matrices of one launch, as publishing has them."""


def main() -> None:
    """Measure both sets of matrices in both types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    layer = [(HIDDEN, HIDDEN), (1024, HIDDEN), (1024, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN), (FFN, HIDDEN)]
    sets = {"model": [*layer, (HIDDEN, FFN)] * LAYERS, "one matrix": [(16_384, 16_384)]}
    found = {}
    for name, shapes in sets.items():
        for dtype in (torch.float32, torch.bfloat16):
            matrices = [torch.randn(shape, device="cuda").to(dtype) / 50 for shape in shapes]
            found[f"{str(dtype).removeprefix('torch.')}, {name}"] = rates(matrices)
    told = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "found": found}
    arguments.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def rates(matrices: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return bandwidths of the kernel, of all that publishing does for it, and of a copy."""
    num_equal = 0
    for matrix, ours in zip(matrices[:8], fused(matrices[:8], BLOCK), strict=True):
        plain = reference(matrix, BLOCK)
        same_codes = torch.equal(ours.codes.view(torch.uint8), plain.codes.view(torch.uint8))
        num_equal += same_codes and torch.equal(ours.scale, plain.scale)
    groups = [matrices[start : start + TOGETHER] for start in range(0, len(matrices), TOGETHER)]
    copies = [torch.empty_like(matrix) for matrix in matrices]
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    moved = num_bytes + sum(matrix.numel() for matrix in matrices)
    together = moved / seconds(lambda: [fused(group, BLOCK) for group in groups])
    copy = 2 * num_bytes / seconds(lambda: [new.copy_(old) for new, old in zip(copies, matrices, strict=True)])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for group in groups:
            fused(group, BLOCK)
        torch.cuda.synchronize()
    kernel_us = sum(each.self_device_time_total for each in profiler.key_averages() if "quantise" in each.key)
    kernel = moved / kernel_us * 1e6
    return {
        "kernel_gb_per_second": round(kernel / 1e9),
        "together_gb_per_second": round(together / 1e9),
        "copy_gb_per_second": round(copy / 1e9),
        "kernel_beside_copy": round(kernel / copy, 3),
        "together_beside_copy": round(together / copy, 3),
        "matrices_of_equal_bits": f"{num_equal} of {len(matrices[:8])}",
    }


def seconds(work: Callable[[], object]) -> float:
    """Return the median of 20."""
    found = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[3:])


if __name__ == "__main__":
    main()
