"""What changes of log-probabilities say about an engine's weights; simulated, with noise as engines have it."""

import numpy as np
import pytest

from rollfeed.weights import Scores, compare

N = 564


def scores(version: int, engine_N, publisher_N) -> Scores:
    return Scores(policy_version=version, engine_N=np.asarray(engine_N), publisher_N=np.asarray(publisher_N))


def drifting(rng, *, noise: float, step: float, num_versions: int, taken: float = 1.0, other: float = 0.0):
    """Yield comparisons with version 0 of an engine that takes a share of each change, and changes of its own."""
    publisher_N = rng.normal(-2.0, 1.0, N)
    engine_N = publisher_N.copy()

    def seen() -> np.ndarray:
        return engine_N + noise * rng.standard_t(3, N) / np.sqrt(3.0)

    base = scores(0, seen(), publisher_N)
    direction_N = rng.standard_t(3, N) / np.sqrt(3.0)
    for version in range(1, num_versions + 1):
        change_N = step * (direction_N + rng.normal(size=N))
        publisher_N = publisher_N + change_N
        engine_N = engine_N + taken * change_N + other * rng.normal(size=N)
        yield compare(base, scores(version, seen(), publisher_N))


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.05, 0.2])
@pytest.mark.parametrize("step", [1e-6, 1e-3, 0.05])
def test_an_engine_that_follows_is_never_refuted(noise, step) -> None:
    rng = np.random.default_rng(0)
    found = [each for _ in range(10) for each in drifting(rng, noise=noise, step=step, num_versions=50)]
    assert not any(each.is_refuted for each in found)


@pytest.mark.parametrize("change", [1e-4, 0.01, 0.05])
def test_noise_that_goes_along_with_the_change_refutes_nothing(change) -> None:
    rng = np.random.default_rng(0)
    direction_N, noise_N, first_N = rng.normal(size=N), rng.normal(size=N), rng.normal(size=N)
    noise_N = 0.05 * (0.8 * noise_N - 0.6 * direction_N)
    base = scores(0, 0.05 * first_N, np.zeros(N))
    found = compare(base, scores(1, 0.05 * first_N + change * direction_N + noise_N, change * direction_N))
    assert found.slope < 0.6
    assert not found.is_refuted


@pytest.mark.parametrize("noise", [1e-6, 0.05, 0.2])
def test_an_engine_that_stays_behind_is_refuted_as_soon_as_the_change_is_above_the_noise(noise) -> None:
    found = list(drifting(np.random.default_rng(1), noise=noise, step=0.01, num_versions=40, taken=0.0))
    first = next(number for number, each in enumerate(found) if each.is_refuted)
    assert found[first].change < 0.75 * max(noise, 0.02)
    assert all(each.is_refuted for each in found[first:])


def test_an_exact_engine_is_refuted_where_a_hundredth_of_the_change_is_missing() -> None:
    (found,) = drifting(np.random.default_rng(2), noise=1e-6, step=0.05, num_versions=1, taken=0.99)
    assert found.is_refuted
    assert found.slope == pytest.approx(0.99, abs=1e-3)


def test_a_change_that_is_not_the_publishers_is_refuted_though_the_slope_is_right() -> None:
    (found,) = drifting(np.random.default_rng(3), noise=1e-3, step=1e-3, num_versions=1, other=0.02)
    assert found.is_other
    assert not found.is_behind


def test_nothing_is_concluded_where_nothing_has_changed() -> None:
    (found,) = drifting(np.random.default_rng(4), noise=0.05, step=0.0, num_versions=1)
    assert not found.is_refuted
    assert not found.is_proved


def test_an_engine_is_proved_when_one_that_stayed_behind_would_show() -> None:
    found = list(drifting(np.random.default_rng(5), noise=0.05, step=0.005, num_versions=30))
    assert not found[0].is_proved
    assert found[-1].is_proved
