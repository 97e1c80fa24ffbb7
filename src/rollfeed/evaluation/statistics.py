"""Numbers about right and wrong answers: intervals of an accuracy and of its change, and how often k tries do.

Invariant: every number is arithmetic on counts; nothing is drawn at random.

Axes: P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

_Z = NormalDist().inv_cdf(0.975)
"""Of the normal distribution, 95 % is within so many deviations of the mean."""


class Interval(NamedTuple):
    """A confidence interval: of a proportion within 0 and 1, of the change of one within -1 and 1."""

    low: float
    high: float


def wilson_interval(num_correct: float, num_trials: float) -> Interval:
    """Return the 95 % score interval of a proportion; without trials it is all of 0 to 1.

    It stays within 0 and 1 and keeps its coverage near both ends, where the normal interval has none.

    Args:
        num_correct: Successes; not an integer where a trial may succeed in part.
        num_trials: Independent ones; not an integer where they are an effective number.

    Raises:
        ValueError: If the counts are out of range.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (JASA 22, 1927).
    """
    if not 0 <= num_correct <= num_trials:
        raise ValueError(f"{num_correct} of {num_trials} trials cannot be right")
    if num_trials == 0:
        return Interval(0.0, 1.0)
    proportion, spread = num_correct / num_trials, _Z * _Z / num_trials
    middle = proportion + spread / 2
    half_width = _Z * math.sqrt(proportion * (1 - proportion) / num_trials + spread / (4 * num_trials))
    # The ends are 0 and 1 exactly where all answers agree; rounding would leave them beside it.
    low = 0.0 if num_correct == 0 else (middle - half_width) / (1 + spread)
    high = 1.0 if num_correct == num_trials else (middle + half_width) / (1 + spread)
    return Interval(max(0.0, low), min(1.0, high))


def cluster_interval(shares_P: Sequence[float], *, num_trials: float) -> Interval:
    """Return the 95 % interval of the mean over prompts, each of which has several answers that depend on each other.

    It is Wilson's for as many independent trials as would give the mean the variance that it has, by how much prompts
    differ; where all agree each is one trial. Of prompts with one answer each it is Wilson's.

    Args:
        shares_P: Of each prompt, within 0 and 1: of right answers, or the chance that one of k is.
        num_trials: Answers a prompt, or answers over k: no mean is worth more independent trials.

    Raises:
        ValueError: If a share is out of range.

    Source: E. L. Korn and B. I. Graubard, "Confidence intervals for proportions with small expected number of positive
    counts estimated from survey data" (Survey Methodology 24, 1998), for the effective number of trials.
    """
    num_prompts, total = len(shares_P), math.fsum(shares_P)
    if num_trials == 1 or num_prompts < 2:
        return wilson_interval(total, num_prompts)
    mean, of_mean = total / num_prompts, _covariance(shares_P, shares_P) / (num_prompts - 1)
    effective = mean * (1 - mean) / of_mean if of_mean > 0.0 else float(num_prompts)
    effective = min(effective, num_prompts * num_trials) * _t_shrinkage(num_prompts - 1)
    return wilson_interval(mean * effective, effective)


def paired_interval(
    before_P: Sequence[float], after_P: Sequence[float], *, trials_before: int, trials_after: int
) -> Interval:
    """Return the 95 % interval of the mean of ``after_P - before_P``, the shares of right answers to the same prompts.

    It combines the intervals of both means and takes the covariance of the prompts into account; a change that no
    prompt shows is not certain to be 0, as it would be by the variance of the differences.

    Args:
        before_P: Of each prompt, within 0 and 1.
        after_P: Of the same prompts in the same order.
        trials_before: Answers to a prompt of ``before_P``.
        trials_after: Answers to a prompt of ``after_P``.

    Raises:
        ValueError: If the prompts are not as many, or a share is out of range.

    Source: R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on
    paired data" (Statistics in Medicine 17, 1998), method 10, with its correction of the covariance; G. Y. Zou and A.
    Donner, "Construction of confidence limits about effect measures" (Statistics in Medicine 27, 2008), for means
    whose intervals are not Wilson's.
    """
    if len(before_P) != len(after_P):
        raise ValueError(f"{len(before_P)} and {len(after_P)} prompts are not the same ones")
    if not before_P:
        return Interval(-1.0, 1.0)
    before = cluster_interval(before_P, num_trials=trials_before)
    after = cluster_interval(after_P, num_trials=trials_after)
    first, last = fmean(before_P), fmean(after_P)
    correlation = _correlation(before_P, after_P, correction=0.5 / (len(before_P) * min(trials_before, trials_after)))

    def distance(of_last: float, of_first: float) -> float:
        return math.sqrt(max(0.0, of_last**2 + of_first**2 - 2 * correlation * of_last * of_first))

    change = last - first
    return Interval(
        max(-1.0, change - distance(last - after.low, before.high - first)),
        min(1.0, change + distance(after.high - last, first - before.low)),
    )


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


def _correlation(before_P: Sequence[float], after_P: Sequence[float], *, correction: float) -> float:
    spread = math.sqrt(_covariance(before_P, before_P) * _covariance(after_P, after_P))
    if spread == 0.0:
        return 0.0
    shared = _covariance(before_P, after_P)
    return (max(0.0, shared - correction) if shared > 0 else shared) / spread


def _covariance(ours_P: Sequence[float], theirs_P: Sequence[float]) -> float:
    """Return the covariance of these prompts, divided by P."""
    ours, theirs = fmean(ours_P), fmean(theirs_P)
    return fmean([(one - ours) * (other - theirs) for one, other in zip(ours_P, theirs_P, strict=True)])


def _t_shrinkage(degrees: int) -> float:
    """Return the square of the normal quantile over that of Student's t.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5.
    """
    z = _Z
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return (z / t) ** 2
