"""The global random states of a process, which packages seed and draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Give a block the global random states of a seed of 32 bits, and put back those from before."""
    before, before_of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_of_numpy)
