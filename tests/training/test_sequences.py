from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.config.train import Normalisation
from rollfeed.training.sequences import token_weights

MASK = np.array([1, 1, 0, 1, 1, 1, 1, 0], np.float32)
ROLLOUTS = np.array([0, 0, 0, 1, 2, 2, 2, 3])


def weights(mask=MASK, rollouts=ROLLOUTS, normalisation=Normalisation.TOKEN, length=4):
    return token_weights(mask, rollouts, normalisation=normalisation, constant_length=length)


def test_each_normalisation_is_what_its_paper_says() -> None:
    np.testing.assert_allclose(weights(), MASK / 6)
    by_sequence = np.array([1 / 2, 1 / 2, 0, 1, 1 / 3, 1 / 3, 1 / 3, 0]) / 3
    np.testing.assert_allclose(weights(normalisation=Normalisation.SEQUENCE), by_sequence, rtol=1e-6)
    np.testing.assert_allclose(weights(normalisation=Normalisation.CONSTANT), MASK / (4 * 3), rtol=1e-6)


@pytest.mark.parametrize("normalisation", Normalisation)
def test_r22_loss_of_a_masked_sample_and_another_is_that_of_the_other(normalisation: Normalisation) -> None:
    """R22: the normaliser is the number of tokens with mask 1, and a sample without any changes nothing."""
    alone = weights(np.ones(3, np.float32), np.zeros(3, np.int64), normalisation)
    both = weights(np.array([1, 1, 1, 0, 0], np.float32), np.array([0, 0, 0, 1, 1]), normalisation)
    np.testing.assert_array_equal(both, [*alone, 0, 0])


@pytest.mark.parametrize("normalisation", Normalisation)
def test_nothing_trained_on_weighs_nothing(normalisation: Normalisation) -> None:
    assert weights(np.zeros(8, np.float32), normalisation=normalisation).tolist() == [0.0] * 8
    assert len(weights(np.zeros(0, np.float32), np.zeros(0, np.int64), normalisation)) == 0


def test_forks_share_the_weight_of_one_rollout() -> None:
    forked = weights(np.ones(6, np.float32), np.array([0, 0, 0, 0, 1, 1]), Normalisation.SEQUENCE)
    assert forked[:4].sum() == pytest.approx(0.5)
    assert forked[4:].sum() == pytest.approx(0.5)


def test_a_constant_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="constant_length"):
        weights(normalisation=Normalisation.CONSTANT, length=None)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1, width=32)), min_size=1, max_size=30))
def test_token_and_sequence_weights_add_up_to_one(tokens: list[tuple[int, float]]) -> None:
    mask = np.array([weight if weight > 1e-3 else 0.0 for _, weight in tokens], np.float32)
    rollouts = np.array([rollout for rollout, _ in tokens])
    for normalisation in (Normalisation.TOKEN, Normalisation.SEQUENCE):
        total = weights(mask, rollouts, normalisation).sum()
        assert total == pytest.approx(1.0 if mask.any() else 0.0, abs=1e-5)
