"""The passes of several ranks, and what they say of each other, without any process."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

from rollfeed.errors import RunFailedError
from rollfeed.training.packing import TrainSequence, pack_sequences
from rollfeed.training.ranks import Ranks, deal, pack_evenly
from rollfeed.types import RoutedExperts


def sequences_of(rng: np.random.Generator, count: int) -> list[TrainSequence]:
    made = []
    for number in range(count):
        ids = rng.integers(0, 50, int(rng.integers(3, 60))).astype(np.int32)
        sequence = TrainSequence.of_tokens(ids, prompt_length=int(rng.integers(1, len(ids))), number=number)
        experts = RoutedExperts.of(rng.integers(0, 4, (len(ids), 6)))
        made.append(replace(sequence, routed_experts=experts))
    return made


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_make_as_many_passes_and_compute_everything_once(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    for _ in range(20):
        sequences = sequences_of(rng, int(rng.integers(1, 40)))
        weights = [each.mask_T for each in sequences]
        plain = pack_sequences(sequences, weights, micro_batch_tokens=128, share_prompts=False)
        even = pack_evenly(sequences, weights, micro_batch_tokens=128, num_ranks=num_ranks, share_prompts=False)
        assert -(-len(even) // num_ranks) <= -(-len(plain) // num_ranks)
        assert all(each.token_ids_BL.size <= 128 for each in even)
        packed = [(each, bool(rng.integers(2))) for each in even]
        dealt = [deal(packed, Ranks(rank, num_ranks)) for rank in range(num_ranks)]
        assert len({tuple(learns for _, learns in each) for each in dealt}) == 1
        real = [(each, learns) for its in dealt for each, learns in its if each.sample_indices]
        assert Counter(map(_key, real)) == Counter(map(_key, packed))
        idle = [each for its in dealt for each, _ in its if not each.sample_indices]
        assert not any(each.weights_T.any() or each.mask_T.any() or each.num_inputs for each in idle)
        assert len(idle) < 2 * num_ranks
        for each in idle:
            arrays = {field.name: getattr(each, field.name) for field in fields(each)}
            for name, array in arrays.items():
                if isinstance(array, np.ndarray):
                    assert array.shape[: 2 if "_BL" in name else 1] == ((1, 2) if "_BL" in name else (1,)), name


def _key(each: tuple[object, bool]) -> tuple[int, bool]:
    return id(each[0]), each[1]


def test_passes_of_several_ranks_are_made_even_where_the_last_round_would_be_short() -> None:
    sequences = sequences_of(np.random.default_rng(0), 30)
    weights = [each.mask_T for each in sequences]
    assert len(pack_sequences(sequences, weights, micro_batch_tokens=10_000, share_prompts=False)) == 1
    first, second = pack_evenly(sequences, weights, num_ranks=2, micro_batch_tokens=10_000, share_prompts=False)
    sizes = first.token_ids_BL.size, second.token_ids_BL.size
    assert max(sizes) < 0.6 * sum(sizes)


def test_ranks_that_are_not_alike_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"the settings": "a", "the version of torch": "2"}, {"the settings": "b", "the version of torch": "2"}]
    monkeypatch.setattr(Ranks, "everybodys", lambda self, value: told)
    with pytest.raises(RunFailedError, match="do not agree on the settings: a in rank 0 and b in rank 1"):
        Ranks(1, 2).check_alike(told[1])
    monkeypatch.setattr(Ranks, "everybodys", lambda self, value: [told[0], told[0]])
    Ranks(1, 2).check_alike(told[0])
