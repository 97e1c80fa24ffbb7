"""Numbers about right and wrong answers: an interval of an accuracy, and how often k tries do.

Invariant: every number is exact arithmetic on counts; nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple


class Interval(NamedTuple):
    """A confidence interval of a proportion, within 0 and 1."""

    low: float
    high: float


def wilson_interval(num_correct: float, num_trials: int, *, confidence: float = 0.95) -> Interval:
    """Return the score interval of a proportion; without trials it is all of 0 to 1.

    It stays within 0 and 1 and keeps its coverage near both ends, where the normal interval has none.

    Args:
        num_correct: Successes; not an integer where a trial may succeed in part.
        num_trials: Independent ones.
        confidence: Share of such intervals that hold the true proportion.

    Raises:
        ValueError: If the counts or the confidence are out of range.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (JASA 22, 1927).
    """
    if not 0 <= num_correct <= num_trials:
        raise ValueError(f"{num_correct} of {num_trials} trials cannot be right")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence = {confidence}: must be between 0 and 1")
    if num_trials == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    proportion, spread = num_correct / num_trials, z * z / num_trials
    middle = proportion + spread / 2
    half_width = z * math.sqrt(proportion * (1 - proportion) / num_trials + spread / (4 * num_trials))
    # The ends are 0 and 1 exactly where all answers agree; rounding would leave them beside it.
    low = 0.0 if num_correct == 0 else (middle - half_width) / (1 + spread)
    high = 1.0 if num_correct == num_trials else (middle + half_width) / (1 + spread)
    return Interval(max(0.0, low), min(1.0, high))


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of ``k`` answers, drawn without putting back, is right.

    Over the answers of a prompt this is an unbiased estimate of the chance that one of k new answers is right.

    Raises:
        ValueError: If there are fewer than ``k`` answers.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), section 2.1.
    """
    _check(num_answers, num_correct, k)
    return 1.0 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def pass_hat_k(num_answers: int, num_correct: int, k: int) -> float:
    """Return the chance that all of ``k`` answers, drawn without putting back, are right: pass^k.

    Raises:
        ValueError: If there are fewer than ``k`` answers.

    Source: Yao et al., "tau-bench" (arXiv:2406.12045), section 3.
    """
    _check(num_answers, num_correct, k)
    return math.comb(num_correct, k) / math.comb(num_answers, k)


def powers_of_two(limit: int) -> Sequence[int]:
    """Return 1, 2, 4 and so on, as far as ``limit``."""
    return [1 << power for power in range(limit.bit_length())]


def _check(num_answers: int, num_correct: int, k: int) -> None:
    if not 0 <= num_correct <= num_answers:
        raise ValueError(f"{num_correct} of {num_answers} answers cannot be right")
    if not 1 <= k <= num_answers:
        raise ValueError(f"k = {k}: must be 1 to {num_answers}, the number of answers")
