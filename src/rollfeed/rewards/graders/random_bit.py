"""Grader ``random``: 0 or 1 by chance, for baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollfeed.seeds import derive_seed
from rollfeed.types import Verdict

SEED_KEY = "sample_seed"
"""Entry of the metadata with an integer that stands for the run's seed and the sample; the hub sets it."""


def grade_random(response: str, label: Any, metadata: Mapping[str, Any]) -> Verdict:
    """Give 0 or 1 with equal chance, the same whenever the sample's seed is the same; else by the response."""
    seed = metadata.get(SEED_KEY)
    part = seed if isinstance(seed, int) else response.encode("utf-8", "replace").decode()
    return Verdict(reward=float(derive_seed("random reward", part) & 1))
