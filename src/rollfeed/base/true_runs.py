"""Runs of true values in an array, as the sampled tokens of a response are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """Places one behind the other, from ``start`` to before ``end``."""

    start: int
    end: int


def runs_of(flags: NDArray[np.bool_]) -> list[Run]:
    """Return the longest runs of true values."""
    if not flags.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [Run(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
