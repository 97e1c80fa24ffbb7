"""Scores of responses that were compared with each other.

Axes: U responses that differ, of one prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.judge import PairScores
from rollfeed.rewards.judging.client import JudgeFailedError

_NUM_STEPS = 500
_PRIOR_WINS = 0.5
"""Won by each response against each other beforehand, so that one that wins always is not infinitely strong."""


class Comparisons:
    """The outcomes of all comparisons of ``size`` responses."""

    def __init__(self, size: int) -> None:
        self.won_UU = np.full((size, size), 0.5)
        """The score of the first against the second; 0.5 is a tie."""
        self.told: list[list[str]] = [[] for _ in range(size)]
        """What was said of each, for people."""
        self.failures: dict[int, JudgeFailedError] = {}

    def settle(self, first: int, second: int, score: float, *, told: str | None = None) -> None:
        """Note the score of the first."""
        self.won_UU[first, second], self.won_UU[second, first] = score, 1.0 - score
        for one, own in ((first, score), (second, 1.0 - score)) if told else ():
            self.told[one].append(f"{own:g} of 1 against another: {told}")


def scores_of(made: Comparisons, sizes_U: NDArray[np.int64], kind: PairScores) -> NDArray[np.float64]:
    """Return what each response wins on the average against the other members of its group, from 0 to 1. ``(U,)``.

    Args:
        made: All comparisons.
        sizes_U: Members of the group that gave each response; they tie with each other.
        kind: Whether wins are those that were seen, or those that strengths make probable.
    """
    expected_UU = made.won_UU
    if kind is PairScores.BRADLEY_TERRY:
        strengths_U = _strengths(made.won_UU, sizes_U)
        expected_UU = strengths_U[:, None] / (strengths_U[:, None] + strengths_U)
    others_UU = np.broadcast_to(sizes_U, expected_UU.shape) - np.eye(len(sizes_U))
    return np.asarray((expected_UU * others_UU).sum(axis=1) / others_UU.sum(axis=1), np.float64)


def _strengths(won_UU: NDArray[np.float64], sizes_U: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the strengths under which what was won is most probable, ties being half won. ``(U,)``.

    Source: the minorisation-maximisation of Hunter (2004), "MM algorithms for generalized Bradley-Terry models".
    """
    others_UU = 1.0 - np.eye(len(sizes_U))
    weights_UU = sizes_U[:, None] * sizes_U * others_UU
    wins_U = (won_UU * weights_UU + _PRIOR_WINS * others_UU).sum(axis=1)
    games_UU = weights_UU + 2 * _PRIOR_WINS * others_UU
    strengths_U = np.ones(len(sizes_U))
    for _ in range(_NUM_STEPS if len(sizes_U) > 1 else 0):
        strengths_U = wins_U / (games_UU / (strengths_U[:, None] + strengths_U)).sum(axis=1)
        strengths_U /= np.exp(np.log(strengths_U).mean())
    return strengths_U
