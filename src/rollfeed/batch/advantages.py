"""Group-relative advantages.

Axes: G rollouts of a group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STD_EPSILON = 1e-6  # keeps a group of equal rewards at 0 instead of 0/0


def group_advantages(rewards_G: NDArray[np.float64], *, divide_by_std: bool = False) -> NDArray[np.float64]:
    """Return reward minus the group's mean, ``(G,)``; divided by the group's standard deviation if asked.

    The division weights very easy and very hard prompts up. Sources: GRPO (arXiv:2402.03300,
    section 4.1.2) divides; Dr. GRPO (arXiv:2503.20783) does not. A group of one has advantage 0.
    """
    if not np.ptp(rewards_G):  # the mean of equal floats need not be one of them
        return np.zeros_like(rewards_G, np.float64)
    centred_G = rewards_G - rewards_G.mean()
    if divide_by_std:
        return np.asarray(centred_G / (rewards_G.std() + _STD_EPSILON), np.float64)
    return np.asarray(centred_G, np.float64)
