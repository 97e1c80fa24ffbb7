"""Micro-batches of an update, cut so that every rank makes as many passes and computes about as many tokens.

All ranks pack all of a mini-batch, in the same way, and each takes its own: nothing has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.training.packing import MicroBatch, TrainSequence, pack_sequences
from rollfeed.training.ranks.process_ranks import Ranks

_TRIALS = 6
"""Of smaller micro-batches: what is left of the difference between too small and too large is 1 part in 64."""
Dealt = list[tuple[MicroBatch, bool]]
"""Micro-batches, and whether there is a gradient."""


def pack_evenly(
    sequences: Sequence[TrainSequence],
    weights: Sequence[NDArray[np.float32]],
    *,
    micro_batch_tokens: int,
    num_ranks: int,
    **options: Any,
) -> list[MicroBatch]:
    """Return micro-batches as :func:`pack_sequences` makes them; for several ranks smaller ones, no more passes a rank.

    Where the last round of passes would leave ranks without work, or with little, micro-batches are made as small as
    the number of rounds allows.
    """
    packed = pack_sequences(sequences, weights, micro_batch_tokens=micro_batch_tokens, **options)
    if num_ranks == 1 or not packed:
        return packed
    most = -(-len(packed) // num_ranks) * num_ranks
    low = max(sum(each.num_inputs for each in packed) // most, *(sequence.num_inputs for sequence in sequences)) - 1
    high = max(each.token_ids_BL.size for each in packed)
    for _ in range(_TRIALS):
        middle = (low + high + 1) // 2
        if middle == high:
            break
        trial = pack_sequences(sequences, weights, micro_batch_tokens=middle, **options)
        if len(trial) > most:
            low = middle
        else:
            packed, high = trial, middle
    return packed


def deal(packed: Dealt, ranks: Ranks) -> Dealt:
    """Return a rank's micro-batches of an update; every rank has as many of both kinds, of about the same sizes.

    The others wait for the slowest in every pass, so those of a round are neighbours in size; who has the largest goes
    round. A rank for which none is left computes one that counts for nothing.
    """
    if ranks.size == 1:
        return packed
    dealt: Dealt = []
    for learns in (True, False):
        of_kind = sorted((each for each, its in packed if its is learns), key=lambda each: -each.token_ids_BL.size)
        for number, start in enumerate(range(0, len(of_kind), ranks.size)):
            turn = of_kind[start : start + ranks.size]
            place = (ranks.rank + number) % ranks.size
            dealt.append((turn[place] if place < len(turn) else _idle(turn[0]), learns))
    return dealt


def pass_figures(packed: Iterable[Dealt]) -> dict[str, float]:
    """Return metrics of the passes of all ranks."""
    learnt = [micro_batch for each in packed for micro_batch, learns in each if learns]
    return {
        #: train/computed_tokens: tokens of the passes with a gradient, prompts that are shared once
        "computed_tokens": float(sum(each.num_inputs for each in learnt)),
        #: train/padded_tokens: the same with padding
        "padded_tokens": float(sum(each.token_ids_BL.size for each in learnt)),
        #: train/micro_batches: passes with a gradient
        "micro_batches": float(len(learnt)),
    }


def _idle(like: MicroBatch) -> MicroBatch:
    """Return two places of which one is scored, with weight 0."""
    return replace(
        like,
        token_ids_BL=np.zeros((1, 2), np.int64),
        branches_BL=None,
        position_ids_BL=np.arange(2, dtype=np.int64)[None],
        rows_T=np.zeros(1, np.int64),
        columns_T=np.zeros(1, np.int64),
        targets_T=np.zeros(1, np.int64),
        sequence_ids_T=like.sequence_ids_T[:1],
        mask_T=np.zeros(1, np.float32),
        rollout_logprobs_T=np.zeros(1, np.float32),
        advantages_T=np.zeros(1, np.float32),
        weights_T=np.zeros(1, np.float32),
        versions_T=like.versions_T[:1],
        sample_indices=(),
        num_inputs=0,
        sampling_mask=None,
        pictures_B=((),),
        is_picture_BL=None,
        is_seeing_T=np.zeros(1, np.bool_),
        experts_BLC=None,
    )
