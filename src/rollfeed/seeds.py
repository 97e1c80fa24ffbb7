"""Seeds derived from what they are for, so that no random state has to be kept.

At the level of ``types``: parts that may not import each other share it.
"""

from __future__ import annotations

import json
from hashlib import blake2b


def derive_seed(*parts: str | int) -> int:
    """Return 64 bits that depend on all ``parts`` and their order, the same in every process."""
    return int.from_bytes(blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "little")


def rollout_seed(run_seed: int, *, step: int, group_index: int, member: int) -> int:
    """Return the sampling seed of a rollout.

    It depends on what is sampled, never on when: two runs of one seed ask for the same tokens.
    """
    return derive_seed(run_seed, "rollout", step, group_index, member)
