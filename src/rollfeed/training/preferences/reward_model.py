"""The trainer of reward models: a score for each text, learned from pairs of which one is preferred.

The loss is minus the log of the chance that the preferred answer wins, as Bradley and Terry (1952) have it and Ouyang
et al. train with it (arXiv:2203.02155, equation 1), with the margin of Touvron et al. (arXiv:2307.09288, equation 2).

Axes: B rows, L places in a row, T scored texts, two a pair; E pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollfeed.conversations.pairs import PAIR
from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.model_files.classifiers import load_classifier, logits_at, scores_every_place
from rollfeed.training.model import Policy, switch_dropout_off
from rollfeed.training.objective import Tally, TokenArrays, TrainedPart, TrainReport
from rollfeed.training.packing import MicroBatch, PackedRow, TrainSequence, lay_out
from rollfeed.training.trainer import Trainer
from rollfeed.types import TrainBatch


class ScoringModel(Policy):
    """A classifier of one label: its logit at the last token is the score of a text."""

    def scores(self, micro_batch: MicroBatch) -> Tensor:
        """Return the scores of a micro-batch's texts, ``(T,)``."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            arrays = (micro_batch.token_ids_BL, micro_batch.rows_T, micro_batch.columns_T)
            return logits_at(self.model, *map(self._tensor, arrays))[:, 0].float()

    def _find_head(self) -> None:
        """It has none over a vocabulary."""


class RewardModelTrainer(Trainer):
    """Trains a classifier of one label on pairs; one that a causal language model becomes begins with scores of 0.

    Arguments are those of :class:`Trainer`.

    Raises:
        CheckpointError: If the model cannot be loaded, or is a classifier of several labels or with another head.
        ConfigError: As :class:`Trainer`.
    """

    _margins_S: NDArray[np.float32] = np.empty(0, np.float32)

    def train_step(self, batch: TrainBatch) -> TrainReport:
        """Train on a batch of pairs; raises as :meth:`Trainer.train_step`."""
        margins = [[group.prompt.metadata[PAIR]["margin"]] * len(group.samples) for group in batch.groups]
        self._margins_S = np.array([margin for each in margins for margin in each], np.float32)
        return super().train_step(batch)

    @property
    def config_changes(self) -> Mapping[str, Any]:
        """The entries of ``config.json`` that make a model's folder the classifier's."""
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {"architectures": [type(self._policy.model).__name__], **labels}

    def _load(self, folder: Path, *, trust_remote_code: bool, **options: Any) -> Policy:
        model = load_classifier(
            folder,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            change_config=switch_dropout_off,
            new_head=True,
        )
        if not scores_every_place(model) or model.config.num_labels != 1:
            raise CheckpointError(
                f"{folder}: a reward model of pairs has one label, and scores what a causal model makes of the last "
                f"token; this {type(model).__name__} has {model.config.num_labels}, or another head: begin with a "
                "causal language model"
            )
        return ScoringModel(model.to(self.device), **options)

    def _pack(self, sequences: Sequence[TrainSequence]) -> list[tuple[MicroBatch, bool]]:
        """Return micro-batches of whole pairs, first-fit decreasing; every text is scored at its last token."""
        scored = [_scored_at_end(sequence) for sequence in sequences]
        for sequence in scored:
            self._policy.check(sequence, name="sample", remedy="lower engine.context_length")
        pairs = [[*members] for _, members in groupby(range(len(scored)), key=lambda number: scored[number].family)]
        pairs = [sorted(pair, key=lambda number: -scored[number].num_inputs) for pair in pairs if len(pair) == 2]
        weights = [np.full(1, 1.0 / max(len(pairs), 1), np.float32) for _ in scored]
        budget, bins = self._settings.micro_batch_tokens, list[list[list[int]]]()
        for pair in sorted(pairs, key=lambda pair: -scored[pair[0]].num_inputs):
            if 2 * scored[pair[0]].num_inputs > budget:
                raise ConfigError(
                    f"train.micro_batch_tokens = {budget}: sample {scored[pair[0]].sample_index} has "
                    f"{scored[pair[0]].num_inputs} tokens, and a pair's answers go together: raise it to twice that"
                )
            width = [scored[bin_[0][0]].num_inputs for bin_ in bins]
            fits = (bin_ for bin_, each in zip(bins, width, strict=True) if 2 * (len(bin_) + 1) * each <= budget)
            if (chosen := next(fits, None)) is None:
                bins.append([pair])
            else:
                chosen.append(pair)
        return [
            (lay_out([_row(scored, number) for pair in bin_ for number in pair], scored, weights), True)
            for bin_ in bins
        ]

    def _part(self, micro_batch: MicroBatch, learns: bool) -> TrainedPart:
        return TrainedPart(micro_batch, learns, TokenArrays.of(micro_batch, self.device), None, None)

    def _loss(self, part: TrainedPart, tally: Tally) -> Tensor:
        arrays, model = part.arrays, self._policy
        assert isinstance(model, ScoringModel)
        with self._stopwatch.part("forward"):
            scores_T = model.scores(part.micro_batch)
            # The advantage of the preferred answer is 1, that of the other one -1.
            ahead_E = (scores_T * arrays.advantages_T).reshape(-1, 2).sum(dim=1)
            margins_T = torch.from_numpy(self._margins_S[part.micro_batch.sequence_ids_T]).to(self.device)
            loss_E = -logsigmoid(ahead_E - margins_T[::2])
            tally.count(arrays.mask_T)
            #: train/pair_accuracy: share of pairs whose scores are in their order before the update; equal ones count
            #: half; where `train.kind = "reward_model"`, as the next one
            order_E = (ahead_E.detach() > 0).float() + 0.5 * (ahead_E.detach() == 0).float()
            tally.add("pair_accuracy", order_E.repeat_interleave(2), arrays.mask_T)
            #: train/score_margin: score of the preferred answer less that of the other one
            tally.add("score_margin", ahead_E.repeat_interleave(2), arrays.mask_T)
            return (loss_E * arrays.weights_T[::2]).sum()


def _scored_at_end(sequence: TrainSequence) -> TrainSequence:
    """Return a sequence whose last token is an input: what would be predicted behind it stands for the score."""
    ids, one = sequence.token_ids, np.ones(1, np.float32)
    return replace(
        sequence,
        token_ids=np.append(ids, ids[-1]),
        positions_T=np.array([len(ids)], np.int64),
        versions_T=None,
        mask_T=one,
        rollout_logprobs_T=0 * one,
        advantages_T=sequence.advantages_T[-1:],
        sampling_mask=None,
    )


def _row(sequences: Sequence[TrainSequence], number: int) -> PackedRow:
    sequence = sequences[number]
    return PackedRow([number], sequence.prompt_length, sequence.num_inputs, has_pictures=False)
