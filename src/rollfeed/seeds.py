"""Seeds derived from what they are for, so that no random state has to be kept.

At the level of ``types``: parts that may not import each other share it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeVar

_T = TypeVar("_T")


def derive_seed(*parts: str | int) -> int:
    """Return 64 bits that depend on all ``parts`` and their order, the same in every process."""
    return int.from_bytes(blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "little")


def rollout_seed(run_seed: int, *, step: int, group_index: int, member: int) -> int:
    """Return the sampling seed of a rollout.

    It depends on what is sampled, never on when: two runs of one seed ask for the same tokens.
    """
    return derive_seed(run_seed, "rollout", step, group_index, member)


def choose(weights: Mapping[_T, float], seed: int) -> _T:
    """Return one of the keys, by weights above 0 and a seed of :func:`derive_seed`, the same in every process."""
    point = seed / 2**64 * math.fsum(weights.values())
    for choice, weight in weights.items():
        point -= weight
        if point < 0:
            return choice
    return list(weights)[-1]  # rounding
