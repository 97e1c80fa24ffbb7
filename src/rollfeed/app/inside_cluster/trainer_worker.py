"""The trainer of a run in a process of its own, called by the process of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollfeed.app.model import load_settings_model
from rollfeed.app.training.checks import not_computed
from rollfeed.app.training.trainers import load_trainer, probes_of
from rollfeed.config import Settings
from rollfeed.errors import COMPUTING_ERRORS, RunFailedError
from rollfeed.store.codec import decode
from rollfeed.types import Group, TrainBatch, WeightProbe

if TYPE_CHECKING:
    from torch import Tensor

    from rollfeed.training.checkpoint import TrainerState
    from rollfeed.training.objective import TrainReport
    from rollfeed.training.ranks import Ranks
    from rollfeed.training.supervised import Demonstration


T = TypeVar("T")


class TrainerWorker:
    """Trains in a thread, one call after the other, whoever waits for it."""

    def __init__(self, settings: Settings, num_batches: int, folders: Sequence[Path] = ()) -> None:
        self._settings = settings
        self._num_batches = num_batches
        self._folders = folders
        self._ranks: Ranks | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Load the model.

        Raises:
            ConfigError: If something that training needs is not on this node.
        """
        await self._do(self._open)

    async def train_step(self, *packed: Any) -> TrainReport:
        """Train on a batch, given as :func:`rollfeed.app.training.remote_trainer.packed_batch` returns it."""
        batch = _read_batch(*packed)
        try:
            return await self._do(lambda: self._trainer.train_step(batch))
        except COMPUTING_ERRORS as error:
            raise RunFailedError(not_computed(error, step=batch.step)) from error

    async def is_mid_batch(self) -> bool:
        """Return whether a batch failed after some of its updates."""
        return self._trainer.is_mid_batch

    async def weights(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name, on the CPU."""
        return await self._do(lambda: {name: each.detach().cpu() for name, each in self._trainer.weights().items()})

    async def take_as_reference(self) -> None:
        """Measure the divergence from the model as it is now."""
        await self._do(self._trainer.take_as_reference)

    async def state_dict(self) -> TrainerState:
        """Return all that :meth:`load_state_dict` needs to go on exactly from here."""
        return await self._do(self._state)

    async def load_state_dict(self, state: TrainerState) -> int:
        """Go to a state; return the number of batches trained on.

        Raises:
            CheckpointError: If it is of another model.
        """
        await self._do(lambda: self._trainer.load_state_dict(state))
        return self._trainer.step

    async def begin_probes(self, precision: str, *packed: Any) -> WeightProbe | None:
        """Choose the texts that weights are proven by; return what is said of them now, None where there are none."""
        checkpoint = self._model.checkpoint
        self._probes = probes_of(self._settings, self._trainer, checkpoint=checkpoint, precision=precision)
        batch = _read_batch(*packed)
        async with self._turn:
            return await self._probes.begin(batch)

    async def take_probe(self) -> WeightProbe | None:
        """Return what the trainer says of the texts now."""
        async with self._turn:
            return await self._probes.take()

    async def begin_supervised(self, learning_rate: float, micro_batch_tokens: int) -> None:
        """Begin a series of updates by demonstrations."""
        from rollfeed.training.supervised import SupervisedUpdates

        self._updates = SupervisedUpdates(
            self._trainer.policy, learning_rate=learning_rate, micro_batch_tokens=micro_batch_tokens
        )

    async def supervise(self, demonstrations: Sequence[Demonstration]) -> float:
        """Make one update; return the loss before it."""
        return await self._do(lambda: self._updates.update(demonstrations))

    def _open(self) -> None:
        self._model = load_settings_model(self._settings, samples=False)
        self._trainer = load_trainer(
            self._settings,
            serving=self._model.checkpoint,
            num_batches=self._num_batches,
            ranks=self._ranks,
            folders=self._folders,
        )

    def _state(self) -> TrainerState:
        from rollfeed.training.checkpoint import TrainerState

        state = self._trainer.state_dict()
        return TrainerState(tensors={name: each.cpu() for name, each in state.tensors.items()}, values=state.values)

    async def _do(self, work: Callable[[], T]) -> T:
        async with self._turn:
            return await asyncio.to_thread(work)


def _read_batch(
    step: int, policy_version: int, groups: list[bytes], advantages_S: Any, penalties_S: NDArray[np.float32] | None
) -> TrainBatch:
    return TrainBatch(
        step=step,
        policy_version=policy_version,
        groups=tuple(decode(Group, each) for each in groups),
        advantages_S=advantages_S,
        penalties_S=penalties_S,
        metrics={},
    )
