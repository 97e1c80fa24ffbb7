"""What of a batch is trained on: token sequences with their masks, advantages and weights.

Axes: T trained tokens of one sequence, those with weight 0 left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.train import Normalisation
from rollfeed.errors import ConfigError
from rollfeed.types import Advantages, Group, Sample, SamplingMask, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sample's tokens, up to the last one that is trained on.

    Raises:
        ConfigError: If its first token is to be trained on, which nothing predicts.
    """

    sequence_id: int
    """The sample's place in its batch."""
    sample_index: int
    """The sample's ``index``, for messages."""
    rollout_id: int
    """Equal for forks; counted within the batch."""
    family: int
    """Equal where prompts may be equal: the group's place in the batch."""
    token_ids: NDArray[np.int32]
    """Prompt and response."""
    prompt_length: int
    positions_T: NDArray[np.int64]
    """Where the trained tokens are."""
    mask_T: NDArray[np.float32]
    """Their weights, none of them 0."""
    rollout_logprobs_T: NDArray[np.float32]
    advantages_T: NDArray[np.float32]
    sampling_mask: SamplingMask | None = None
    """What the trained tokens were drawn from."""

    def __post_init__(self) -> None:
        if len(self.positions_T) and self.positions_T[0] == 0:
            raise ConfigError(
                f"sample {self.sample_index}: its prompt has no tokens, so nothing predicts its first one; "
                "give every prompt at least one token"
            )

    @property
    def num_inputs(self) -> int:
        """Tokens that the model has to see: all before the last trained one."""
        return int(self.positions_T[-1]) if len(self.positions_T) else 0


def split_into_minibatches(batch: TrainBatch, num_minibatches: int) -> list[list[TrainSequence]]:
    """Return the sequences of each mini-batch, whole groups in their order, about as many groups in each.

    Samples without a trained token are left out, and so are those with ``remove_sample``.

    Raises:
        ConfigError: If there are fewer groups than mini-batches, or a sample cannot be trained on.
    """
    if num_minibatches > len(batch.groups):
        raise ConfigError(
            f"train.num_minibatches = {num_minibatches}: a batch of {len(batch.groups)} groups cannot be split into as "
            "many; lower it, or raise rollout.rollout_batch_size"
        )
    per_group: list[list[TrainSequence]] = []
    sequence_id = rollout_id = 0
    for family, group in enumerate(batch.groups):
        sequences, sequence_id, rollout_id = _of_group(group, family, sequence_id, rollout_id, batch.advantages_S)
        per_group.append(sequences)
    parts = np.array_split(np.arange(len(per_group)), num_minibatches)
    return [[sequence for index in part for sequence in per_group[index]] for part in parts]


def token_weights(
    mask_T: NDArray[np.float32],
    rollout_ids_T: NDArray[np.int64],
    *,
    normalisation: Normalisation,
    constant_length: int | None = None,
) -> NDArray[np.float32]:
    """Return what each token's loss is multiplied with before all are added up, ``(T,)``.

    Only trained tokens count: sequences that are masked out altogether change neither the sum nor what it is divided
    by. Forks of one rollout are one output: they share its weight.

    Args:
        mask_T: The weight of each token of the whole mini-batch; 0 is not trained on.
        rollout_ids_T: Equal for the tokens of one rollout.
        normalisation: ``TOKEN`` divides by all trained tokens (DAPO, arXiv:2503.14476, section 3.3); ``SEQUENCE`` by
            those of the rollout, and then by the rollouts (GRPO, arXiv:2402.03300, section 4.1.1, equation 3);
            ``CONSTANT`` by ``constant_length`` instead of the former (Dr. GRPO, arXiv:2503.20783, section 3.2).
        constant_length: Needed for ``CONSTANT``.

    Raises:
        ValueError: If it is needed and not given.
    """
    mask_64 = np.asarray(mask_T, np.float64)
    if not mask_64.any():
        return np.zeros(len(mask_64), np.float32)
    if normalisation is Normalisation.TOKEN:
        return np.asarray(mask_64 / mask_64.sum(), np.float32)
    _, number_T = np.unique(rollout_ids_T, return_inverse=True)
    sums = np.bincount(number_T, weights=mask_64)
    num_rollouts = np.count_nonzero(sums)
    if normalisation is Normalisation.SEQUENCE:
        return np.asarray(mask_64 / np.where(sums > 0, sums, 1.0)[number_T] / num_rollouts, np.float32)
    if constant_length is None:
        raise ValueError("normalisation by a constant needs constant_length")
    return np.asarray(mask_64 / (constant_length * num_rollouts), np.float32)


def sequence_weights(
    sequences: Sequence[TrainSequence], *, normalisation: Normalisation, constant_length: int | None
) -> list[NDArray[np.float32]]:
    """Return :func:`token_weights` of a mini-batch, ``(T,)`` for each sequence."""
    if not sequences:
        return []
    lengths = [len(sequence.mask_T) for sequence in sequences]
    weights = token_weights(
        np.concatenate([sequence.mask_T for sequence in sequences]),
        np.repeat([sequence.rollout_id for sequence in sequences], lengths),
        normalisation=normalisation,
        constant_length=constant_length,
    )
    return np.split(weights, np.cumsum(lengths)[:-1])


def sequence_of(
    sample: Sample, *, sequence_id: int, rollout_id: int, family: int, advantage: float | NDArray[np.float32]
) -> TrainSequence:
    """Return a sample as what is trained on; ``advantage`` is of all its tokens, or one for each of its response.

    Raises:
        ConfigError: If it has images, or nothing predicts its first token.
    """
    if sample.images:
        raise ConfigError(f"sample {sample.index}: it has images, and this trainer takes text only")
    trained = np.flatnonzero(sample.loss_mask)
    positions_T = trained + sample.prompt_length
    return TrainSequence(
        sequence_id=sequence_id,
        sample_index=sample.index,
        rollout_id=rollout_id,
        family=family,
        token_ids=sample.token_ids,
        prompt_length=sample.prompt_length,
        positions_T=positions_T.astype(np.int64),
        mask_T=sample.loss_mask[trained],
        rollout_logprobs_T=sample.logprobs[trained],
        advantages_T=np.broadcast_to(np.asarray(advantage, np.float32), sample.response_length)[trained],
        sampling_mask=None if sample.sampling_mask is None else sample.sampling_mask.at(trained),
    )


def _of_group(
    group: Group, family: int, sequence_id: int, rollout_id: int, advantages_S: Advantages
) -> tuple[list[TrainSequence], int, int]:
    sequences = []
    for rollout in group.rollouts:
        for sample in rollout.samples:
            if sample.loss_mask.any() and not sample.remove_sample:
                sequence = sequence_of(
                    sample,
                    sequence_id=sequence_id,
                    rollout_id=rollout_id,
                    family=family,
                    advantage=advantages_S[sequence_id],
                )
                sequences.append(sequence)
            sequence_id += 1
        rollout_id += 1
    return sequences, sequence_id, rollout_id
