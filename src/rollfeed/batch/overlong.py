"""The soft penalty of long responses, and what it makes of the rewards of a group.

Axes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import Group, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """Soft Overlong Punishment of DAPO (arXiv:2503.14476, section 3.4, equation 13)."""

    length: int
    """L_max: response tokens, inserted ones included, from which on the whole penalty is taken."""
    cache: int
    """L_cache: tokens before that over which it grows."""
    factor: float = 1.0
    """The whole penalty; 1 in the paper."""

    def __call__(self, sample: Sample) -> float:
        """Return what is added to the sample's reward: 0 up to ``length - cache`` tokens, then falling to -factor."""
        over = sample.response_length - (self.length - self.cache)
        return -self.factor * min(over / self.cache, 1.0) if over > 0 else 0.0

    def of(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        """Return the penalty of every sample. ``(S,)``."""
        return np.array([self(sample) for group in groups for sample in group.samples], np.float32)

    def applied(self, group: Group, *, reward_key: str | None) -> Group:
        """Return the group with penalties in its rewards."""

        def penalised(sample: Sample) -> Sample:
            value = sample.get_reward_value(reward_key) + self(sample)
            if isinstance(sample.reward, dict):
                return replace(sample, reward={**sample.reward, str(reward_key): value})
            return replace(sample, reward=value)

        rollouts = [replace(each, samples=tuple(map(penalised, each.samples))) for each in group.rollouts]
        return replace(group, rollouts=tuple(rollouts))
