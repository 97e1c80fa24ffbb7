from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from rollfeed.evaluation import pass_at_k, pass_hat_k, powers_of_two, wilson_interval


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


@given(num_trials=st.integers(1, 500), share=st.floats(0, 1), confidence=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_interval_is_the_one_of_scipy(num_trials: int, share: float, confidence: float) -> None:
    num_correct = round(share * num_trials)
    ours = wilson_interval(num_correct, num_trials, confidence=confidence)
    theirs = binomtest(num_correct, num_trials).proportion_ci(confidence_level=confidence, method="wilson")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(num_trials=st.integers(1, 1000), share=st.floats(0, 1))
def test_interval_holds_the_proportion_and_stays_within_bounds(num_trials: int, share: float) -> None:
    num_correct = share * num_trials
    low, high = wilson_interval(num_correct, num_trials)
    assert 0.0 <= low <= num_correct / num_trials + 1e-12
    assert num_correct / num_trials - 1e-12 <= high <= 1.0


def test_interval_of_nothing_is_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("num_correct", "num_trials", "confidence"), [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_impossible_counts_are_refused(num_correct: int, num_trials: int, confidence: float) -> None:
    with pytest.raises(ValueError, match=r"cannot be right|must be between"):
        wilson_interval(num_correct, num_trials, confidence=confidence)


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
