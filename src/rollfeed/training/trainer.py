"""The trainer: batches in, new weights out; on a CPU or a GPU, alone or as one of several ranks.

It computes where it is called. A loop that has other things to do calls it in a thread. Ranks are all called with
the same arguments.

Axes: R response tokens of a sample, T trained tokens of a micro-batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollfeed.config.train import NonFinitePolicy, TrainSettings
from rollfeed.errors import RunFailedError
from rollfeed.model_files import read_headers
from rollfeed.model_files.low_rank import AdaptedNames
from rollfeed.model_files.names import CheckpointNames
from rollfeed.protocols import LossFn, PictureProcessor
from rollfeed.training.checkpoint import TrainerState, has_reference, read_state, state_of, take_state, write_state
from rollfeed.training.losses import OwnLoss, sequence_weights
from rollfeed.training.model import (
    Policy,
    choose_device,
    computing_options,
    freeze,
    hold_linear_layers_as_computed,
    load_policy_model,
    prepare_passes,
    spread,
)
from rollfeed.training.objective import Tally, TokenArrays, TrainedPart, TrainReport, micro_batch_loss
from rollfeed.training.optimizer import Optimizer, Stopwatch
from rollfeed.training.packing import MicroBatch, TrainSequence, sequence_of, split_into_minibatches
from rollfeed.training.ranks import ALONE, Ranks, deal, pack_evenly, pass_figures, write_weights
from rollfeed.training.reference import HeldReference, LessKL, Minibatches, RewardKL
from rollfeed.training.sharing import longest_tree, may_share_pictures
from rollfeed.types import Sample, TrainBatch

logger = logging.getLogger(__name__)


class _NotFinite(NamedTuple):
    what: str


class Trainer:
    """Trains a transformers causal language model on batches of rollouts.

    The policy that is trained is the one at ``temperature``; ``num_batches`` of the whole run decide the learning rate,
    and ``max_response_length`` is the default of ``loss.constant_length``. ``reference`` is a folder of its own for the
    model that divergence is measured from; ``pictures`` is the model's processor of these, if it has one; ``ranks`` are
    those that train together; ``loss_function`` is what ``loss.function`` names; ``advantages_less_kl`` makes the
    advantages where ``loss.reward_kl_coefficient`` is above 0.

    Raises:
        CheckpointError: If the model cannot be loaded, or is none that can be trained on sampled tokens.
        ConfigError: If there is no such device, or the model knows no activation checkpointing.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        settings: TrainSettings,
        temperature: float,
        num_batches: int,
        max_response_length: int,
        reference: Path | None = None,
        trust_remote_code: bool = False,
        pictures: PictureProcessor | None = None,
        ranks: Ranks = ALONE,
        loss_function: LossFn | None = None,
        advantages_less_kl: LessKL | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.step = 0
        """Batches trained on so far."""
        self._num_made = 0
        """Updates of a batch that has not ended."""
        self.device = ranks.device or choose_device(settings.device)
        self._ranks = ranks
        self._settings = settings
        self._own_loss = None if loss_function is None else OwnLoss(loss_function)
        self._constant_length = settings.loss.constant_length or max_response_length
        options = {"temperature": temperature, "pictures": pictures, **computing_options(settings, self.device)}
        load: Callable[[Path], Policy] = partial(self._load, trust_remote_code=trust_remote_code, **options)
        self._stopwatch = Stopwatch()
        self._policy = load(checkpoint)
        freeze(self._policy.model, settings.freeze_params)
        given, lora = (self._policy.model, read_headers(checkpoint)), settings.lora
        self._names = CheckpointNames(*given) if lora is None else AdaptedNames(*given, **lora.model_dump())
        is_compared, is_given = settings.loss.has_reference, reference is not None
        own = load(reference or checkpoint) if is_compared and (lora is None or is_given) else None
        held = partial(HeldReference, self._policy, own, settings=settings.loss, is_given=is_given)
        self._reference = held(is_spread=ranks.size > 1) if is_compared else None
        is_rewarded = settings.loss.reward_kl_coefficient > 0
        self._reward_kl = RewardKL(settings.loss, advantages_less_kl, ranks) if is_rewarded else None
        prepare_passes(self._policy, settings)
        with self._policy.computing():
            self._longest_tree = longest_tree(self._policy, own, checkpoint=checkpoint, settings=settings)
        if lora is not None:  # after the trials, which are in fp32
            hold_linear_layers_as_computed(self._policy, is_published=True)
        self._shares_pictures: bool | None = None  # not tried
        policies = (self._policy, own)
        self.exact_policy = self._policy if ranks.size == 1 else spread(*policies, ranks, device=self.device, **options)
        """The same model for passes in the type of its weights."""
        if self._reference is not None and lora is not None:
            self._reference.take()  # of what is spread by now
        self._optimizer = Optimizer(
            self._policy.model, settings=settings.optimizer, num_updates=settings.num_updates(num_batches)
        )

    def _load(self, folder: Path, *, trust_remote_code: bool, **options: Any) -> Policy:
        # A model that is spread over ranks is whole in the memory of the processor only.
        device = self.device if self._ranks.size == 1 else torch.device("cpu")
        return Policy(load_policy_model(folder, device=device, trust_remote_code=trust_remote_code), **options)

    @property
    def is_mid_batch(self) -> bool:
        """Whether a batch failed after some of its updates: the weights are then those of no number of batches."""
        return self._num_made > 0

    @property
    def policy(self) -> Policy:
        """The model that is trained."""
        return self._policy

    @property
    def shares_prompts(self) -> bool:
        """Whether the prompt of a group is computed once: asked for, and the model allows it."""
        return self._longest_tree > 0

    def train_step(self, batch: TrainBatch) -> TrainReport:
        """Train on a batch: ``num_epochs`` times ``num_minibatches`` updates.

        The gradient of an update is that of the whole mini-batch, however many micro-batches it is computed in. Samples
        with advantage 0 bring none where no divergence is penalised, and are only scored; they count in the
        normalisation. Metrics are means over all trained tokens of the updates, those of such samples included, as
        ``tokens`` is; ``zero_advantage_tokens`` are of such samples, and ``computed_tokens``, ``padded_tokens`` and
        ``micro_batches`` are of the passes with a gradient. Updates left out as not finite have no part in the metrics.

        Raises:
            ConfigError: If a sample does not fit ``micro_batch_tokens`` or the model; nothing has been changed then.
            RunFailedError: If a loss or gradient is not finite and ``on_non_finite`` is ``stop``, or the GPU's memory
                is not enough; the message says what had been changed by then.
        """
        began = time.perf_counter()
        self._stopwatch = Stopwatch()
        minibatches = split_into_minibatches(batch, self._settings.num_minibatches, pictures=self._policy.pictures)
        packed = [self._pack(minibatch) for minibatch in minibatches]
        dealt = [deal(each, self._ranks) for each in packed]
        tally = Tally()
        try:
            with self._policy.computing():
                parts, told = self._parts(dealt, batch)
                updates, skipped = self._updates(parts, tally, step=batch.step)
        except torch.OutOfMemoryError as error:
            raise RunFailedError(
                f"step {batch.step}: the GPU's memory is not enough for train.micro_batch_tokens = "
                f"{self._settings.micro_batch_tokens}; lower it, or set train.activation_checkpointing = true; "
                f"{self._what_was_changed()}"
            ) from error
        finally:
            self._optimizer.forget_gradients()
        self.step, self._num_made = self.step + 1, 0
        if self._reference is not None:
            self._reference.refresh(self.step)
        figures = {
            **tally.over(self._ranks).metrics(),
            **{name: float(np.mean([update[name] for update in updates])) for name in (updates or [{}])[0]},
            #: train/updates: updates that were made with the batch
            "updates": float(len(updates)),
            #: train/skipped_updates: updates that were left out, as not finite or without an advantage
            "skipped_updates": float(len(skipped)),
            **pass_figures(packed),
            **told,
        }
        return TrainReport(
            step=batch.step,
            num_updates=len(updates),
            skipped=tuple(skipped),
            metrics={f"train/{name}": value for name, value in figures.items()},
            seconds=time.perf_counter() - began,
            part_seconds=self._stopwatch.seconds,
        )

    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return what the policy now says of each sample's response, ``(R,)``; 0.0 where the loss mask is 0.

        Raises:
            ConfigError: If a sample does not fit ``micro_batch_tokens`` or the model.
        """
        sequence = partial(sequence_of, advantage=1.0, pictures=self._policy.pictures)
        sequences = [
            sequence(sample, sequence_id=number, rollout_id=number, family=sample.group_index)
            for number, sample in enumerate(samples)
            if sample.loss_mask.any()
        ]
        results = [np.zeros(sample.response_length, np.float32) for sample in samples]
        for number, scored in self._policy.score_each(micro_batch for micro_batch, _ in self._pack(sequences)).items():
            results[number][samples[number].loss_mask != 0] = scored.logprobs_T.float().numpy()
        return results

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights by Hugging Face name, tied ones once, as ``TensorUpdate`` takes them.

        They are the trainer's own memory, or merged with the adapter when they are asked for: done with before the next
        :meth:`train_step`.
        """
        return self._names.tensors()

    def take_as_reference(self) -> None:
        """Measure the divergence, where it is penalised, from the model as it is now, unless a reference was given."""
        if self._reference is not None:
            self._reference.take()

    @property
    def adapter(self) -> AdaptedNames | None:
        """The adapter that is trained with ``train.lora``; None without."""
        return self._names if isinstance(self._names, AdaptedNames) else None

    def write_weights(self, folder: Path) -> None:
        """Write the weights as files into a folder; raises CheckpointError where it takes none."""
        write_weights(self._names, folder, ranks=self._ranks)

    def state_dict(self) -> TrainerState:
        """Return all that :meth:`load_state_dict` needs to go on exactly from here; for a trainer alone."""
        kept = self._reference.tensors() if self._reference is not None and self._reference.is_stored else {}
        return state_of(self._policy.model, self._optimizer, step=self.step, reference=kept)

    def load_state_dict(self, state: TrainerState) -> None:
        """Go to a state that :meth:`state_dict` returned; on a CPU, all that follows is equal bit by bit.

        That is so under equal settings; which may be others, :mod:`rollfeed.config.resuming` says.

        Raises:
            CheckpointError: If it is of another model; nothing is changed then.
        """
        held = self._reference
        own = {} if held is None else held.tensors()
        self.step, self._num_made = take_state(state, self._policy.model, self._optimizer, reference=own), 0
        if held is not None:
            held.is_stored = held.is_stored or has_reference(state)

    def save(self, folder: Path) -> None:
        """Write the state as a new folder; see :func:`rollfeed.training.checkpoint.write_state`."""
        write_state(self.state_dict(), folder, ranks=self._ranks)

    def load(self, folder: Path) -> None:
        """Go to the state in a folder; raises as :meth:`load_state_dict`, and if it cannot be read."""
        self.load_state_dict(read_state(folder))

    def _pack(self, sequences: Sequence[TrainSequence]) -> list[tuple[MicroBatch, bool]]:
        """Return micro-batches, and whether there is a gradient: sequences with one and without are apart."""
        loss = self._settings.loss
        weights = sequence_weights(sequences, normalisation=loss.normalisation, constant_length=self._constant_length)
        for sequence in sequences:
            self._policy.check(sequence, name="sample", remedy="lower engine.context_length")
        if self._shares_pictures is None and any(sequence.pictures.pictures for sequence in sequences):
            longest = self._longest_tree
            self._shares_pictures = may_share_pictures(self._policy, sequences, longest=longest, name=self.checkpoint)
        learn = [bool(sequence.advantages_T.any()) or loss.learns_without_advantage for sequence in sequences]
        return [
            (self._policy.arranged(micro_batch), learns)
            for learns in (True, False)
            for micro_batch in pack_evenly(
                list(compress(sequences, (each is learns for each in learn))),
                list(compress(weights, (each is learns for each in learn))),
                micro_batch_tokens=self._settings.micro_batch_tokens,
                num_ranks=self._ranks.size,
                share_prompts=self.shares_prompts,
                longest_tree=self._longest_tree,
                shares_pictures=self._shares_pictures is True,
            )
        ]

    def _part(self, micro_batch: MicroBatch, learns: bool) -> TrainedPart:
        with torch.no_grad():
            # With a single update the start is what that update's own pass says.
            is_asked = self._settings.updates_per_batch > 1 or self._reward_kl is not None
            start_T = self._policy.score(micro_batch).logprobs_T if is_asked else None
            reference_T = self._reference.logprobs(micro_batch) if self._reference else None
        return TrainedPart(micro_batch, learns, TokenArrays.of(micro_batch, self.device), start_T, reference_T)

    def _parts(
        self, packed: Sequence[Sequence[tuple[MicroBatch, bool]]], batch: TrainBatch
    ) -> tuple[Minibatches, dict[str, float]]:
        """Return what all updates of a batch have of it, and metrics."""
        minibatches = [[self._part(*each) for each in minibatch] for minibatch in packed]
        return (minibatches, {}) if self._reward_kl is None else self._reward_kl.applied(batch, minibatches)

    def _updates(
        self, minibatches: Minibatches, tally: Tally, *, step: int
    ) -> tuple[list[dict[str, float]], list[str]]:
        """Make all updates of a batch; return the figures of each, and why others were left out."""
        updates: list[dict[str, float]] = []
        skipped: list[str] = []
        for _ in range(self._settings.num_epochs):
            for parts in minibatches:
                update = self._update(parts, tally, step=step)
                if isinstance(update, str):
                    skipped.append(update)
                else:
                    updates.append(update)
        return updates, skipped

    def _update(self, parts: Sequence[TrainedPart], tally: Tally, *, step: int) -> dict[str, float] | str:
        """Make one update and return its figures, or why there was none."""
        try:
            outcome = self._try_update(parts, tally)
        finally:
            self._optimizer.forget_gradients()
        if isinstance(outcome, _NotFinite):
            message = f"step {step}, update {self._optimizer.num_updates}: {outcome.what} is not finite"
            if self._settings.on_non_finite is NonFinitePolicy.STOP:
                raise RunFailedError(
                    f"{message}; {self._what_was_changed()} (train.on_non_finite = 'skip' leaves such updates out)"
                )
            logger.warning("%s: left out", message)
            outcome = message
        self._optimizer.num_updates += 1
        return outcome

    def _what_was_changed(self) -> str:
        if self._num_made == 0:
            return "nothing was changed"
        made = "1 update" if self._num_made == 1 else f"{self._num_made} updates"
        return f"{made} of this batch had been made before, which no checkpoint holds"

    def _try_update(self, parts: Sequence[TrainedPart], tally: Tally) -> dict[str, float] | _NotFinite | str:
        own = Tally()
        losses = [(part, self._backward(part, own)) for part in parts if part.learns]
        for part in parts:
            if not part.learns:
                with torch.no_grad():
                    self._loss(part, own)
                #: train/zero_advantage_tokens: of `train/tokens`, those of samples with advantage 0, only scored
                own.count(part.arrays.mask_T, name="zero_advantage_tokens")
        refusal = own.refusal_of_pictures(self._settings.max_picture_mismatch_kl)
        if refusal is not None:
            raise RunFailedError(f"step {self.step}: {refusal}; {self._what_was_changed()}")
        if not losses:
            tally.merge(own)
            return "no sample has both trained tokens and an advantage"
        with self._stopwatch.part("backward"):
            read = torch.stack([loss for _, loss in losses]).tolist()
            broken = [
                f"the loss ({loss}) of the micro-batch with samples "
                + ", ".join(map(str, part.micro_batch.sample_indices[:8]))
                for (part, _), loss in zip(losses, read, strict=True)
                if not math.isfinite(loss)
            ]
            told = self._ranks.everybodys((sum(read), broken[:1]))
        if refusals := [each for _, theirs in told for each in theirs]:
            return _NotFinite(refusals[0] if self._own_loss is None else self._own_loss.named(refusals[0]))
        rate = self._optimizer.learning_rate
        self._num_made += 1  # before it is whole: what fails within has changed something
        with self._stopwatch.part("optimizer"):
            norm = self._optimizer.step()
        if not math.isfinite(norm):
            self._num_made -= 1
            return _NotFinite(f"the gradient of {self._optimizer.first_broken_gradient() or 'all weights together'}")
        tally.merge(own)
        #: train/loss, train/learning_rate: mean over the updates; the loss in `sft` mode in nats a trained token
        #: train/grad_norm: norm of the gradient before clipping, mean over the updates
        return {"loss": sum(loss for loss, _ in told), "grad_norm": norm, "learning_rate": rate}

    def _backward(self, part: TrainedPart, tally: Tally) -> Tensor:
        loss = self._loss(part, tally)
        with self._stopwatch.part("backward"):
            # Of ranks, the gradient is the mean.
            (loss * self._ranks.size).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, part: TrainedPart, tally: Tally) -> Tensor:
        with self._stopwatch.part("forward"):
            return micro_batch_loss(
                self._policy.score(part.micro_batch),
                part.arrays,
                settings=self._settings.loss,
                start_logprobs_T=part.start_T,
                reference_logprobs_T=part.reference_T,
                tally=tally,
                own=self._own_loss,
                policy_version=self.step,
            )
