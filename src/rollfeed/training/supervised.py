"""Supervised updates: the likelihood of given responses is raised.

Axes: T trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollfeed.config.optimizer import OptimizerSettings
from rollfeed.errors import RunFailedError
from rollfeed.training.model import Policy
from rollfeed.training.optimizer import Optimizer
from rollfeed.training.packing import MicroBatch, TrainSequence, pack_sequences
from rollfeed.training.placed_pictures import placed
from rollfeed.types import Picture


class Demonstration(NamedTuple):
    """A prompt, ``(P,)``, and the response it should have, ``(R,)``, its end token included; token ids."""

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    pictures: tuple[Picture, ...] = ()
    """Of the prompt."""


class SupervisedUpdates:
    """Updates a policy by the mean negative log-likelihood of response tokens.

    The other settings of AdamW are the defaults.
    """

    def __init__(self, policy: Policy, *, learning_rate: float, micro_batch_tokens: int) -> None:
        self._policy = policy
        self._micro_batch_tokens = micro_batch_tokens
        settings = OptimizerSettings(learning_rate=learning_rate)
        self._optimizer = Optimizer(policy.model, settings=settings, num_updates=1)

    def update(self, demonstrations: Sequence[Demonstration]) -> float:
        """Make one update; return the loss before it, in nats a token.

        Raises:
            ConfigError: If a demonstration fits neither the model nor the micro-batch; nothing has been changed then.
            RunFailedError: If the loss or its gradient is not finite; the weights are those before this update.
        """
        sequences = [
            TrainSequence.of_tokens(
                np.concatenate([each.prompt_ids, each.response_ids]),
                prompt_length=len(each.prompt_ids),
                number=number,
                pictures=placed(each.prompt_ids, each.pictures, self._policy.pictures, what=f"demonstration {number}"),
            )
            for number, each in enumerate(demonstrations)
        ]
        for sequence in sequences:
            self._policy.check(sequence, name="demonstration", remedy="leave it out")
        num_tokens = sum(len(sequence.positions_T) for sequence in sequences)
        weights = [np.full(len(sequence.positions_T), 1.0 / num_tokens, np.float32) for sequence in sequences]
        micro_batches = pack_sequences(
            sequences, weights, micro_batch_tokens=self._micro_batch_tokens, share_prompts=False
        )
        try:
            with self._policy.computing():
                loss = sum(self._backward(micro_batch) for micro_batch in micro_batches)
                norm = self._optimizer.step() if math.isfinite(loss) else math.nan
        finally:
            self._optimizer.forget_gradients()
        if not math.isfinite(norm):
            raise RunFailedError(f"supervised update: the loss ({loss}) or its gradient is not finite")
        return loss

    def _backward(self, micro_batch: MicroBatch) -> float:
        weights_T = torch.from_numpy(micro_batch.weights_T).to(self._policy.device)
        loss = -(self._policy.score(micro_batch).logprobs_T * weights_T).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())
