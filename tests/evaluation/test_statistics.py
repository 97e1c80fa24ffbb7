from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, binomtest

from rollfeed.evaluation.statistics import (
    Interval,
    cluster_interval,
    paired_interval,
    pass_at_k,
    pass_hat_k,
    powers_of_two,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("num_correct", "num_trials", "low", "high"),
    [  # Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_has_known_values(num_correct: int, num_trials: int, low: float, high: float) -> None:
    assert wilson_interval(num_correct, num_trials) == pytest.approx((low, high), abs=5e-5)


@given(num_trials=st.integers(1, 500), share=st.floats(0, 1))
def test_interval_is_the_one_of_scipy(num_trials: int, share: float) -> None:
    num_correct = round(share * num_trials)
    ours = wilson_interval(num_correct, num_trials)
    theirs = binomtest(num_correct, num_trials).proportion_ci(method="wilson")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(num_trials=st.integers(1, 1000), share=st.floats(0, 1))
def test_interval_holds_the_proportion_and_stays_within_bounds(num_trials: int, share: float) -> None:
    num_correct = share * num_trials
    low, high = wilson_interval(num_correct, num_trials)
    assert 0.0 <= low <= num_correct / num_trials + 1e-12
    assert num_correct / num_trials - 1e-12 <= high <= 1.0


def test_interval_of_nothing_is_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("num_correct", "num_trials"), [(3, 2), (-1, 2)])
def test_impossible_counts_are_refused(num_correct: int, num_trials: int) -> None:
    with pytest.raises(ValueError, match=r"cannot be right|must be between"):
        wilson_interval(num_correct, num_trials)


@given(answers=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_both_estimators_count_all_choices_of_k_answers(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    chosen = list(combinations(answers, k))
    n, right = len(answers), sum(answers)
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_hat_k(n, right, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


@pytest.mark.parametrize("chance", [0.1, 0.5])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_both_estimators_are_unbiased(chance: float, k: int) -> None:
    n = 6
    weights = [float(binom.pmf(right, n, chance)) for right in range(n + 1)]
    at = sum(weight * pass_at_k(n, right, k) for right, weight in enumerate(weights))
    hat = sum(weight * pass_hat_k(n, right, k) for right, weight in enumerate(weights))
    assert at == pytest.approx(1 - (1 - chance) ** k)
    assert hat == pytest.approx(chance**k)


def test_r40_every_case_of_up_to_eight_answers_is_the_share_of_choices_with_a_right_one() -> None:
    """R40: 1 - C(n-c, k) / C(n, k) by counting, for every n, c and k; nothing is drawn."""
    for n in range(1, 9):
        for right in range(n + 1):
            answers = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                chosen = list(combinations(answers, k))
                assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


@pytest.mark.parametrize("k", [5, 3])
def test_r40_more_tries_than_answers_are_refused(k: int) -> None:
    """R40: k > n with no right answer is no 1.0."""
    with pytest.raises(ValueError, match=f"k = {k}: must be 1 to 2"):
        pass_at_k(2, 0, k)


def test_r40_known_values_of_pass_at_k() -> None:
    """R40: the published examples."""
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(11 / 12)
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(200, 199, 2) == 1.0


@pytest.mark.parametrize(("n", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1)])
def test_impossible_choices_are_refused(n: int, right: int, k: int) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match=r"must be 1 to|cannot be right"):
            estimator(n, right, k)


def test_k_goes_by_powers_of_two_as_far_as_there_are_answers() -> None:
    assert [list(powers_of_two(n)) for n in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8]]


def drawn_shares(random: np.random.Generator, chances_RP: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    return random.binomial(n, chances_RP) / n


def coverage(intervals: list[Interval], truth: float) -> float:
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


@pytest.mark.parametrize(("a", "b", "n"), [(1.0, 1.0, 4), (0.3, 0.6, 8), (5.0, 0.5, 4)])
def test_interval_over_prompts_holds_the_truth_19_times_of_20_where_wilson_is_too_wide(
    a: float, b: float, n: int
) -> None:
    random = np.random.default_rng(3)
    shares_RP = drawn_shares(random, random.beta(a, b, (2000, 200)), n).tolist()
    clustered = [cluster_interval(shares_P, num_trials=n) for shares_P in shares_RP]
    by_prompt = [wilson_interval(sum(shares_P), 200) for shares_P in shares_RP]
    assert 0.94 <= coverage(clustered, a / (a + b)) <= 0.96
    assert coverage(by_prompt, a / (a + b)) > 0.98


def test_interval_of_pass_at_k_holds_the_truth_19_times_of_20() -> None:
    random = np.random.default_rng(4)
    counts_RP = random.binomial(8, random.beta(0.3, 0.6, (2000, 200))).tolist()
    at_2 = {right: pass_at_k(8, right, 2) for right in range(9)}
    intervals = [cluster_interval([at_2[right] for right in row], num_trials=4) for row in counts_RP]
    truth = 1 - 0.6 * 1.6 / (0.9 * 1.9)  # 1 - E[(1 - p)^2] of the beta distribution
    assert 0.94 <= coverage(intervals, truth) <= 0.96


@pytest.mark.parametrize("n", [1, 4])
def test_paired_interval_holds_the_change_19_times_of_20_and_is_narrower_than_two_intervals(n: int) -> None:
    random = np.random.default_rng(7)
    chances_RP = random.beta(0.3, 0.6, (2000, 200))
    before_RP = drawn_shares(random, chances_RP, n).tolist()
    after_RP = drawn_shares(random, chances_RP + 0.2 * (1 - chances_RP), n).tolist()
    intervals = [
        paired_interval(before_P, after_P, trials_before=n, trials_after=n)
        for before_P, after_P in zip(before_RP, after_RP, strict=True)
    ]
    assert 0.94 <= coverage(intervals, 0.2 * (1 - 1 / 3)) <= 0.96
    alone = cluster_interval(before_RP[0], num_trials=n)
    assert intervals[0].high - intervals[0].low < 2**0.5 * (alone.high - alone.low)


@pytest.mark.parametrize(
    "table", [(36, 12, 2, 0), (1, 97, 0, 2), (30, 0, 0, 0), (98, 2, 0, 0), (54, 0, 0, 46), (7, 1, 9, 3)]
)
def test_paired_interval_of_single_answers_is_newcombes_of_the_table(table: tuple[int, int, int, int]) -> None:
    """Of e right both times, f only before, g only after and h never: method 10 as the paper writes it, in counts."""
    e, f, g, h = table
    n = e + f + g + h
    before_P = [1.0] * (e + f) + [0.0] * (g + h)
    after_P = [1.0] * e + [0.0] * f + [1.0] * g + [0.0] * h
    first, last = (e + f) / n, (e + g) / n
    low_first, high_first = wilson_interval(e + f, n)
    low_last, high_last = wilson_interval(e + g, n)
    product, cross = (e + f) * (g + h) * (e + g) * (f + h), e * h - f * g
    corrected = max(cross - n / 2, 0) if cross > 0 else cross
    phi = corrected / product**0.5 if product else 0.0
    below = (last - low_last) ** 2 - 2 * phi * (last - low_last) * (high_first - first) + (high_first - first) ** 2
    above = (high_last - last) ** 2 - 2 * phi * (high_last - last) * (first - low_first) + (first - low_first) ** 2
    expected = (last - first - below**0.5, last - first + above**0.5)
    assert paired_interval(before_P, after_P, trials_before=1, trials_after=1) == pytest.approx(expected, abs=1e-12)


def test_paired_interval_of_a_change_that_no_prompt_shows_is_not_a_point() -> None:
    shares_P = [1.0] * 50 + [0.0] * 50
    low, high = paired_interval(shares_P, shares_P, trials_before=1, trials_after=1)
    assert -0.1 < low < 0.0 < high < 0.1


def test_interval_of_prompts_with_one_answer_is_wilsons() -> None:
    assert cluster_interval([1.0, 0.0, 1.0, 1.0], num_trials=1) == wilson_interval(3, 4)
    assert cluster_interval([], num_trials=4) == (0.0, 1.0)


@given(
    counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30),
)
def test_intervals_hold_what_was_found_and_stay_within_bounds(counts: list[tuple[int, int]]) -> None:
    before_P, after_P = [before / 4 for before, _ in counts], [after / 4 for _, after in counts]
    low, high = cluster_interval(before_P, num_trials=4)
    mean = sum(before_P) / max(1, len(before_P))
    assert 0.0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1.0
    low, high = paired_interval(before_P, after_P, trials_before=4, trials_after=4)
    change = sum(after_P) / max(1, len(after_P)) - mean
    assert -1.0 <= low <= change + 1e-9
    assert change - 1e-9 <= high <= 1.0


def test_other_prompts_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="1 and 2 prompts are not the same ones"):
        paired_interval([1.0], [1.0, 0.0], trials_before=1, trials_after=1)
