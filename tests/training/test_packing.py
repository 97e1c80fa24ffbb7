from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfeed.config.train import Normalisation
from rollfeed.errors import ConfigError
from rollfeed.training.losses import sequence_weights, token_weights
from rollfeed.training.packing import pack_sequences, split_into_minibatches
from rollfeed.types import Picture


def pack(batch, *, micro_batch_tokens=40, share_prompts=True):
    [sequences] = split_into_minibatches(batch, 1)
    weights = sequence_weights(sequences, normalisation=Normalisation.TOKEN, constant_length=None)
    packed = pack_sequences(sequences, weights, micro_batch_tokens=micro_batch_tokens, share_prompts=share_prompts)
    return sequences, packed


def context_of(micro_batch, row: int, column: int) -> list[int]:
    """The tokens that a place may see, by position."""
    places = range(column + 1)
    if micro_batch.branches_BL is not None:
        own = micro_batch.branches_BL[row, column]
        places = [place for place in places if micro_batch.branches_BL[row, place] in (0, own)]
    positions = micro_batch.position_ids_BL[row, list(places)].tolist()
    assert positions == list(range(len(positions)))
    return micro_batch.token_ids_BL[row, list(places)].tolist()


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_trained_token_is_there_once_behind_its_own_context(
    seed: int, share_prompts: bool, batch_by_seed
) -> None:
    batch = batch_by_seed(seed, num_groups=4)
    sequences, packed = pack(batch, share_prompts=share_prompts)
    found = Counter()
    for micro_batch in packed:
        assert micro_batch.token_ids_BL.size <= 40
        for t in range(len(micro_batch.targets_T)):
            column = int(micro_batch.columns_T[t])
            context = context_of(micro_batch, int(micro_batch.rows_T[t]), column)
            number = int(micro_batch.sequence_ids_T[t])
            sample = batch.samples[number]
            assert sample.token_ids[: len(context) + 1].tolist() == [*context, int(micro_batch.targets_T[t])]
            place = len(context) - sample.prompt_length
            assert micro_batch.mask_T[t] == sample.loss_mask[place] != 0
            assert micro_batch.rollout_logprobs_T[t] == sample.logprobs[place]
            assert micro_batch.advantages_T[t] == batch.advantages_S[number]
            found[number, place] += 1
    expected = {(n, int(p)) for n, s in enumerate(batch.samples) for p in np.flatnonzero(s.loss_mask)}
    assert found == Counter(expected)
    assert sum(m.weights_T.sum() for m in packed) == pytest.approx(1.0)
    assert len(sequences) == len({number for number, _ in expected})


@pytest.mark.parametrize("share_prompts", [False, True])
def test_an_advantage_a_token_reaches_that_token(share_prompts: bool, batch_by_seed) -> None:
    plain = batch_by_seed(3, num_groups=4)
    rows = tuple(100.0 * n + np.arange(s.response_length, dtype=np.float32) for n, s in enumerate(plain.samples))
    _, packed = pack(replace(plain, advantages_S=rows), share_prompts=share_prompts)
    found = np.sort(np.concatenate([micro_batch.advantages_T for micro_batch in packed]))
    trained = [row[sample.loss_mask != 0] for row, sample in zip(rows, plain.samples, strict=True)]
    np.testing.assert_array_equal(found, np.sort(np.concatenate(trained)))
    for micro_batch in packed:
        np.testing.assert_array_equal(micro_batch.advantages_T // 100, micro_batch.sequence_ids_T)


def test_packing_is_deterministic(batch_by_seed) -> None:
    first, second = pack(batch_by_seed(1))[1], pack(batch_by_seed(1))[1]
    assert len(first) == len(second) > 1
    for a, b in zip(first, second, strict=True):
        for field in fields(a):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_shared_prompts_are_computed_once(sample_of, group_of, batch_of) -> None:
    group = group_of(0, [[sample_of([1, 2, 3, 4], [5, 6, number])] for number in range(5)])
    _, [shared] = pack(batch_of([group], [1.0] * 5))
    _, [apart] = pack(batch_of([group], [1.0] * 5), share_prompts=False)
    assert (shared.num_inputs, apart.num_inputs) == (4 + 5 * 2, 5 * (4 + 2))
    assert shared.branches_BL.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]
    assert apart.branches_BL is None


def test_equal_prompts_of_other_groups_and_other_prompts_of_a_group_are_not_merged(
    sample_of, group_of, batch_of
) -> None:
    fork = [sample_of([1, 2], [3, 3]), sample_of([1, 2, 7], [4, 4])]
    groups = [group_of(0, [fork]), group_of(1, [[sample_of([1, 2], [5, 5])]])]
    _, [micro_batch] = pack(batch_of(groups, [1.0] * 3))
    assert micro_batch.branches_BL is None
    assert micro_batch.token_ids_BL.shape == (3, 4)


def test_rows_of_like_length_lie_together(sample_of, group_of, batch_of) -> None:
    lengths = [3, 17, 4, 18, 2, 19]
    groups = [group_of(n, [[sample_of([1], [2] * length)]]) for n, length in enumerate(lengths)]
    _, packed = pack(batch_of(groups, [1.0] * 6), micro_batch_tokens=57)
    assert [m.token_ids_BL.shape for m in packed] == [(3, 19), (3, 4)]


def test_a_sample_over_the_budget_is_an_error_that_says_what_to_raise(sample_of, group_of, batch_of) -> None:
    group = group_of(0, [[sample_of([1] * 10, [2] * 40, index=7)]])
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens = 40: sample 7 has 49 tokens; raise it"):
        pack(batch_of([group], [1.0]))


def test_samples_without_trained_tokens_are_left_out(sample_of, group_of, batch_of) -> None:
    members = [
        [sample_of([1], [])],
        [sample_of([1], [2, 3], mask=[0, 0])],
        [sample_of([1], [2, 3], remove_sample=True)],
        [sample_of([1], [2, 3], mask=[1, 0])],
    ]
    sequences, [micro_batch] = pack(batch_of([group_of(0, members)], [1.0] * 4))
    assert [s.sequence_id for s in sequences] == [3]
    assert micro_batch.token_ids_BL.tolist() == [[1]]
    assert micro_batch.targets_T.tolist() == [2]


def test_nothing_to_train_on_packs_to_nothing(sample_of, group_of, batch_of) -> None:
    assert pack(batch_of([group_of(0, [[sample_of([1], [])]])], [1.0])) == ([], [])


def test_a_first_token_that_nothing_predicts_is_an_error(sample_of, group_of, batch_of) -> None:
    with pytest.raises(ConfigError, match="sample 5: its prompt has no tokens"):
        pack(batch_of([group_of(0, [[sample_of([], [2, 3], index=5)]])], [1.0]))


def test_images_are_an_error(sample_of, group_of, batch_of) -> None:
    with pytest.raises(ConfigError, match="text only"):
        pack(batch_of([group_of(0, [[sample_of([1], [2], images=(PICTURE,))]])], [1.0]))


def test_minibatches_are_whole_groups_in_order(batch_by_seed) -> None:
    batch = batch_by_seed(2, num_groups=5)
    parts = split_into_minibatches(batch, 2)
    families = [sorted({s.family for s in part}) for part in parts]
    assert families == [[0, 1, 2], [3, 4]]
    [whole] = split_into_minibatches(batch, 1)
    assert [s.sequence_id for part in parts for s in part] == [s.sequence_id for s in whole]


def test_more_minibatches_than_groups_are_an_error(batch_by_seed) -> None:
    with pytest.raises(ConfigError, match=r"train\.num_minibatches = 4: a batch of 3 groups"):
        split_into_minibatches(batch_by_seed(0), 4)


def test_forks_of_a_rollout_are_one_rollout(sample_of, group_of, batch_of) -> None:
    members = [[sample_of([1], [2]), sample_of([1, 2], [3])], [sample_of([1], [4])]]
    sequences, _ = pack(batch_of([group_of(0, members)], [1.0] * 3))
    assert [s.rollout_id for s in sequences] == [0, 0, 1]


PICTURE = Picture(content_hash="ab12", media_type="image/png", width=4, height=3, source="a.png")
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
