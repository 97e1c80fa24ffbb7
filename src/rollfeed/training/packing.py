"""The trained part of a batch: token sequences with their weights, packed into micro-batches of a bounded size.

Rows are padded at the end, and lie side by side in order of length. Causal attention never looks at what comes
later, so a padded row gives exactly what its sequence alone gives, with any causal model and without a mask; sequences
behind one another in one row would need a block-diagonal mask, which PyTorch's CPU kernels compute in full: four
times the attention for twice the tokens. What is worth a mask is a prompt shared by several responses: the row is then
a tree, the prompt followed by its branches, each of which sees the prompt and itself. Where a model attends to trees
block by block, without a mask, they lie behind one another in one row (:meth:`MicroBatch.without_padding`).

The last token of a sequence is no input, because nothing behind it is trained on.

Axes: B rows, L places in a row, T trained tokens of a sequence or a micro-batch, those with weight 0 left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollfeed.errors import ConfigError
from rollfeed.protocols import PictureProcessor
from rollfeed.training.placed_pictures import NO_PICTURES, PlacedPictures, pictures_of_sample
from rollfeed.types import Picture, RoutedExperts, Sample, SamplingMask, TrainBatch

LONGEST_TREE = 1024
"""Places in a row with branches whose attention is computed in full, so that it does not become what counts."""


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
    versions_T: NDArray[np.int64] | None = None
    """Of the weights that sampled them; None where nobody says."""
    sampling_mask: SamplingMask | None = None
    """What the trained tokens were drawn from."""
    pictures: PlacedPictures = NO_PICTURES
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        if len(self.positions_T) and self.positions_T[0] == 0:
            raise ConfigError(
                f"sample {self.sample_index}: its prompt has no tokens, so nothing predicts its first one; "
                "give every prompt at least one token"
            )

    @classmethod
    def of_tokens(
        cls,
        token_ids: NDArray[np.int32],
        *,
        prompt_length: int,
        number: int,
        family: int | None = None,
        pictures: PlacedPictures = NO_PICTURES,
    ) -> TrainSequence:
        """Return a sequence by itself: all behind the prompt is trained on alike, and nobody has sampled it."""
        num_trained = len(token_ids) - prompt_length
        return cls(
            sequence_id=number,
            sample_index=number,
            rollout_id=number,
            family=number if family is None else family,
            token_ids=token_ids,
            prompt_length=prompt_length,
            positions_T=np.arange(prompt_length, len(token_ids), dtype=np.int64),
            mask_T=np.ones(num_trained, np.float32),
            rollout_logprobs_T=np.zeros(num_trained, np.float32),
            advantages_T=np.ones(num_trained, np.float32),
            pictures=pictures,
        )

    @property
    def num_inputs(self) -> int:
        """Tokens that the model has to see: all before the last trained one."""
        return int(self.positions_T[-1]) if len(self.positions_T) else 0


def split_into_minibatches(
    batch: TrainBatch, num_minibatches: int, *, pictures: PictureProcessor | None = None
) -> list[list[TrainSequence]]:
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
    sequence_id = rollout_id = -1
    for family, group in enumerate(batch.groups):
        per_group.append([])
        for rollout in group.rollouts:
            rollout_id += 1
            for sample in rollout.samples:
                sequence_id += 1
                if sample.loss_mask.any() and not sample.remove_sample:
                    places = {"sequence_id": sequence_id, "rollout_id": rollout_id, "family": family}
                    advantage = batch.advantages_S[sequence_id]
                    per_group[-1].append(sequence_of(sample, advantage=advantage, pictures=pictures, **places))
    parts = np.array_split(np.arange(len(per_group)), num_minibatches)
    return [[sequence for index in part for sequence in per_group[index]] for part in parts]


def sequence_of(
    sample: Sample,
    *,
    sequence_id: int,
    rollout_id: int,
    family: int,
    advantage: float | NDArray[np.float32],
    pictures: PictureProcessor | None = None,
) -> TrainSequence:
    """Return a sample as what is trained on; ``advantage`` is of all its tokens, or one for each of its response.

    Raises:
        ConfigError: If it has pictures and there is no processor of these, or nothing predicts its first token.
    """
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
        versions_T=np.repeat(
            np.array([span.policy_version for span in sample.version_spans], np.int64),
            [span.end - span.start for span in sample.version_spans],
        )[trained],
        sampling_mask=None if sample.sampling_mask is None else sample.sampling_mask.at(trained),
        pictures=pictures_of_sample(sample, pictures),
        routed_experts=sample.routed_experts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of tokens that go through the model at once."""

    token_ids_BL: NDArray[np.int64]
    """Padded with 0."""
    branches_BL: NDArray[np.int32] | None
    """0 in a prompt, and the number of the branch behind it; -1 is padding. None where no row has two branches."""
    position_ids_BL: NDArray[np.int64]
    rows_T: NDArray[np.int64]
    columns_T: NDArray[np.int64]
    """The place that predicts the token; several branches may begin at one."""
    targets_T: NDArray[np.int64]
    sequence_ids_T: NDArray[np.int64]
    mask_T: NDArray[np.float32]
    rollout_logprobs_T: NDArray[np.float32]
    advantages_T: NDArray[np.float32]
    weights_T: NDArray[np.float32]
    """What each token's loss is multiplied with."""
    versions_T: NDArray[np.int64]
    """Of the weights that sampled each token; -1 where nobody says."""
    sample_indices: tuple[int, ...]
    num_inputs: int
    """Places that are not padding."""
    sampling_mask: SamplingMask | None
    """What the tokens were drawn from; None where all were drawn from the whole vocabulary."""
    pictures_B: tuple[tuple[Picture, ...], ...]
    is_picture_BL: NDArray[np.bool_] | None
    """Where the tokens stand for these; None where no row has any."""
    is_seeing_T: NDArray[np.bool_]
    """Which tokens are of sequences with pictures."""
    experts_BLC: NDArray[np.int64] | None = None
    """The experts that each place was computed with when it was sampled; -1 is padding. None where some has none."""

    @property
    def token_mask(self) -> NDArray[np.bool_]:
        """True where there is no padding, ``(B, L)``."""
        if self.branches_BL is not None:
            return self.branches_BL >= 0
        is_token_BL: NDArray[np.bool_] = self.position_ids_BL > 0
        is_token_BL[:, 0] = True
        return is_token_BL

    def without_padding(self) -> MicroBatch:
        """Return rows with branches behind one another in one, in which each begins at position 0; others as they are.

        There are no pictures.
        """
        if self.branches_BL is None or len(self.branches_BL) == 1:
            return self
        is_token_BL = self.token_mask
        place_BL = np.cumsum(is_token_BL).reshape(is_token_BL.shape) - 1
        return replace(
            self,
            token_ids_BL=self.token_ids_BL[is_token_BL][None],
            branches_BL=self.branches_BL[is_token_BL][None],
            position_ids_BL=self.position_ids_BL[is_token_BL][None],
            rows_T=np.zeros_like(self.rows_T),
            columns_T=place_BL[self.rows_T, self.columns_T],
            pictures_B=((),),
            experts_BLC=None if self.experts_BLC is None else self.experts_BLC[is_token_BL][None],
        )


@dataclass(slots=True)
class PackedRow:
    """A prompt and the sequences that go on from it; or one sequence."""

    members: list[int]
    prompt_length: int
    length: int
    has_pictures: bool

    def add(self, member: int, extra: int) -> None:
        self.members.append(member)
        self.length += extra


def pack_sequences(
    sequences: Sequence[TrainSequence],
    weights: Sequence[NDArray[np.float32]],
    *,
    micro_batch_tokens: int,
    share_prompts: bool,
    longest_tree: int = LONGEST_TREE,
    shares_pictures: bool = True,
) -> list[MicroBatch]:
    """Return micro-batches of at most ``micro_batch_tokens`` places, padding included, that hold every sequence once.

    First-fit decreasing, the same for the same sequences: rows go by length into the first micro-batch that has room,
    and branches into the first row of their prompt that has.

    Each has at least one trained token, and weights ``(T,)``. With ``share_prompts`` equal prompts of a family become
    one, those with pictures only where ``shares_pictures`` says so and responses bring no more of them;
    ``longest_tree`` is the most places of a row with branches.

    Raises:
        ConfigError: If a sequence alone is longer.
    """
    for sequence in sequences:
        if sequence.num_inputs > micro_batch_tokens:
            raise ConfigError(
                f"train.micro_batch_tokens = {micro_batch_tokens}: sample {sequence.sample_index} has "
                f"{sequence.num_inputs} tokens; raise it to at least that, or lower sampling.rollout_max_response_len"
            )
    longest = min(micro_batch_tokens, longest_tree) if share_prompts else 0
    rows = sorted(_make_rows(sequences, longest, shares_pictures=shares_pictures), key=lambda row: -row.length)
    bins: list[list[PackedRow]] = []

    def go_together(row: PackedRow, other: PackedRow) -> bool:
        # What rows with branches are given of places and of who sees whom is given for all of a micro-batch.
        return shares_pictures or row.has_pictures is other.has_pictures

    for row in rows:
        # The first row is the longest, and every row takes as many places.
        room = (
            bin_
            for bin_ in bins
            if (len(bin_) + 1) * bin_[0].length <= micro_batch_tokens and go_together(row, bin_[0])
        )
        chosen = next(room, None)
        if chosen is None:
            bins.append([row])
        else:
            chosen.append(row)
    return [lay_out(bin_, sequences, weights) for bin_ in bins]


def _make_rows(sequences: Sequence[TrainSequence], longest_tree: int, *, shares_pictures: bool) -> list[PackedRow]:
    """Return the rows, those of each prompt in the order in which they were begun."""
    rows_of_prompt: dict[tuple[object, ...], list[PackedRow]] = {}
    for number in sorted(range(len(sequences)), key=lambda number: -sequences[number].num_inputs):
        sequence = sequences[number]
        prompt_length = sequence.prompt_length
        extra = sequence.num_inputs - prompt_length
        seen = sequence.pictures
        is_alone = bool(seen.pictures) and not (shares_pictures and seen.before(prompt_length) == seen)
        own = number if is_alone else None
        key = (sequence.family, sequence.token_ids[:prompt_length].tobytes(), seen.content_hashes, own)
        rows = rows_of_prompt.setdefault(key, [])
        row = next((row for row in rows if row.length + extra <= longest_tree), None)
        if row is None:
            rows.append(PackedRow([number], prompt_length, sequence.num_inputs, bool(seen.pictures)))
        else:
            row.add(number, extra)
    return [row for rows in rows_of_prompt.values() for row in rows]


def lay_out(
    rows: Sequence[PackedRow], sequences: Sequence[TrainSequence], weights: Sequence[NDArray[np.float32]]
) -> MicroBatch:
    """Return rows side by side, the first of them the longest."""
    num_rows, width = len(rows), rows[0].length
    token_ids_BL = np.zeros((num_rows, width), np.int64)
    branches_BL = np.full((num_rows, width), -1, np.int32)
    # Of padding too, a position is one that the model has, and not beyond those of the row.
    position_ids_BL = np.zeros((num_rows, width), np.int64)
    members = [number for row in rows for number in row.members]
    places: list[NDArray[np.int64]] = []
    for index, row in enumerate(rows):
        prompt_length, start = row.prompt_length, row.prompt_length
        token_ids_BL[index, :prompt_length] = sequences[row.members[0]].token_ids[:prompt_length]
        branches_BL[index, :prompt_length] = 0
        position_ids_BL[index, :prompt_length] = np.arange(prompt_length)
        for branch, number in enumerate(row.members, start=1):
            sequence = sequences[number]
            end = start + sequence.num_inputs - prompt_length
            token_ids_BL[index, start:end] = sequence.token_ids[prompt_length : sequence.num_inputs]
            branches_BL[index, start:end] = branch
            position_ids_BL[index, start:end] = np.arange(prompt_length, sequence.num_inputs)
            before = sequence.positions_T - 1
            places.append(np.where(before < prompt_length, before, before - prompt_length + start))
            start = end
    lengths = [len(sequences[number].positions_T) for number in members]
    chosen = [sequences[number] for number in members]
    seen_B = [sequences[row.members[0]].pictures.before(row.length) for row in rows]
    is_picture_BL = np.zeros((num_rows, width), bool)
    for index, seen in enumerate(seen_B):
        for start, end in seen.places:
            is_picture_BL[index, start:end] = True
    row_of_member = np.repeat(np.arange(num_rows), [len(row.members) for row in rows])
    return MicroBatch(
        token_ids_BL=token_ids_BL,
        branches_BL=branches_BL if len(members) > num_rows else None,
        position_ids_BL=position_ids_BL,
        rows_T=np.repeat(row_of_member, lengths),
        columns_T=np.concatenate(places),
        targets_T=np.concatenate([s.token_ids[s.positions_T].astype(np.int64) for s in chosen]),
        sequence_ids_T=np.repeat([s.sequence_id for s in chosen], lengths),
        mask_T=np.concatenate([s.mask_T for s in chosen]),
        rollout_logprobs_T=np.concatenate([s.rollout_logprobs_T for s in chosen]),
        advantages_T=np.concatenate([s.advantages_T for s in chosen]),
        weights_T=np.concatenate([weights[number] for number in members]),
        versions_T=np.concatenate(
            [np.full(len(s.mask_T), -1) if s.versions_T is None else s.versions_T for s in chosen]
        ),
        sample_indices=tuple(s.sample_index for s in chosen),
        num_inputs=sum(row.length for row in rows),
        sampling_mask=_sampling_mask(chosen),
        pictures_B=tuple(seen.pictures for seen in seen_B),
        is_picture_BL=is_picture_BL if is_picture_BL.any() else None,
        is_seeing_T=np.repeat([bool(s.pictures.pictures) for s in chosen], lengths),
        experts_BLC=_experts(rows, sequences, width),
    )


def _experts(rows: Sequence[PackedRow], sequences: Sequence[TrainSequence], width: int) -> NDArray[np.int64] | None:
    """Return experts by place, those of a shared prompt its first sequence's, ``(B, L, C)``."""
    own = [[sequences[number].routed_experts for number in row.members] for row in rows]
    first = own[0][0]
    if first is None or any(each is None for experts in own for each in experts):
        return None
    experts_BLC = np.full((len(rows), width, first.per_token), -1, np.int64)
    for index, row in enumerate(rows):
        start = 0
        for number in row.members:
            sequence = sequences[number]
            assert sequence.routed_experts is not None
            skipped = row.prompt_length if start else 0
            end = start + sequence.num_inputs - skipped
            experts_BLC[index, start:end] = sequence.routed_experts.numbers[skipped : sequence.num_inputs]
            start = end
    return experts_BLC


def _sampling_mask(sequences: Sequence[TrainSequence]) -> SamplingMask | None:
    masks = [each.sampling_mask or SamplingMask.without(len(each.positions_T)) for each in sequences]
    return SamplingMask.joined(masks) if any(len(mask.token_ids) for mask in masks) else None
