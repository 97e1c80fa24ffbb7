"""Rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollfeed.engine.local.architecture import Rope


def rotary_tables(rope: Rope, *, head_dim: int, context_length: int) -> tuple[Tensor, Tensor]:
    """Return float32 cosines and sines ``(context_length, head_dim / 2)``.

    Sources: RoFormer (arXiv:2104.09864); linear scaling is position interpolation
    (arXiv:2306.15595); ``llama3`` keeps high frequencies, divides low ones by ``factor`` and blends
    between (The Llama 3 Herd of Models, arXiv:2407.21783).
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_context_length * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        frequencies = (1.0 - kept) * frequencies / rope.factor + kept * frequencies
    angles = torch.arange(context_length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()
