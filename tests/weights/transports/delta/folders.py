"""Checkpoint folders that change a little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

TYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
FolderMaker = Callable[..., Path]


def tensors_of(seed: int, *, step: float = 0.0) -> dict[str, torch.Tensor]:
    """Tensors of every type, and of shapes at the edge; with ``step`` a few of their elements are others."""
    first, later = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    found = {}
    for dtype in TYPES:
        for shape in ((7, 33), (1,), (), (0, 3)):
            values = torch.randn(shape, generator=first) * 3
            values += step * torch.randn(shape, generator=later) * (torch.rand(shape, generator=later) < 0.1)
            found[f"{dtype}.{len(shape)}.{values.numel()}"] = values.to(dtype)
    return found


def content_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
