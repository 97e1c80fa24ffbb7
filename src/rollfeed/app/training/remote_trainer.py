"""The trainer in a process of another machine, as the process of the run sees it.

The run directory stays here: what is saved comes here first. A trainer that has died has lost what was not saved, and
is not started again within the run, whose batches are ahead of the last checkpoint: the same command takes both back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rollfeed.cluster import Host, HostDiedError
from rollfeed.errors import RollfeedError
from rollfeed.store.codec import encode
from rollfeed.types import TrainBatch, WeightProbe

if TYPE_CHECKING:
    from torch import Tensor

    from rollfeed.training.objective import TrainReport
    from rollfeed.training.supervised import Demonstration
    from rollfeed.training.trainer import Trainer


class RemoteTrainer:
    """Fits what a training asks of a :class:`rollfeed.training.trainer.Trainer`; made in the event loop.

    Methods that are no coroutines block, and are called in threads.

    Args:
        host: Of a :class:`rollfeed.app.inside_cluster.trainer_worker.TrainerWorker`, which is open.
        checkpoint: The folder that training begins with, here.
        where_it_goes_on: Says it for the message when the trainer is lost.
    """

    def __init__(self, host: Host, *, checkpoint: Path, where_it_goes_on: Callable[[], str | None]) -> None:
        self.checkpoint = checkpoint
        self.step = 0
        """Batches trained on."""
        self.is_mid_batch = False
        """Whether there is no state of a number of batches: one failed within, or the trainer is lost."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._where_it_goes_on = where_it_goes_on
        self._is_lost = False

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker.

        Raises:
            HostDiedError: If it has died; the message says where the training goes on.
        """
        try:
            return await self._host.call(method, *args)
        except HostDiedError as error:
            self._is_lost = self.is_mid_batch = True
            goes_on = self._where_it_goes_on()
            then = "" if goes_on is None else f"; the same command {goes_on}"
            raise HostDiedError(f"the trainer is lost: {error}{then}") from None

    def train_step(self, batch: TrainBatch) -> TrainReport:
        """Train on a batch, as :meth:`rollfeed.training.trainer.Trainer.train_step`."""
        try:
            report: TrainReport = self._ask("train_step", *packed_batch(batch))
        except RollfeedError:
            if not self._is_lost:
                self.is_mid_batch = self._ask("is_mid_batch")
            raise
        self.step += 1
        return report

    def weights(self) -> Mapping[str, Tensor]:
        """Return a copy of the weights, on the CPU."""
        weights: dict[str, Tensor] = self._ask("weights")
        return weights

    def take_as_reference(self) -> None:
        """Measure the divergence from the model as it is now, as the trainer's own method."""
        self._ask("take_as_reference")

    def save(self, folder: Path) -> None:
        """Write the state as a new folder, here."""
        from rollfeed.training.checkpoint import write_state

        write_state(self._ask("state_dict"), folder)

    def load(self, folder: Path) -> None:
        """Go to the state in a folder, which is here."""
        from rollfeed.training.checkpoint import read_state

        self.step, self.is_mid_batch = self._ask("load_state_dict", read_state(folder)), False

    def probes(self, precision: str) -> RemoteProbes:
        """Return what scores texts with the weights as an engine of this precision has them."""
        return RemoteProbes(self, precision)

    def supervised(self, *, learning_rate: float, micro_batch_tokens: int) -> RemoteUpdates:
        """Return what updates the policy by demonstrations."""
        self._ask("begin_supervised", learning_rate, micro_batch_tokens)
        return RemoteUpdates(self._ask)

    def _ask(self, method: str, *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self.call(method, *args), self._loop).result()


RunTrainer: TypeAlias = "Trainer | RemoteTrainer"


class RemoteProbes:
    """Fits what a training asks of :class:`rollfeed.training.probe.TrainerProbes`."""

    def __init__(self, trainer: RemoteTrainer, precision: str) -> None:
        self._trainer = trainer
        self._precision = precision
        self._has_begun = False

    async def begin(self, batch: TrainBatch) -> WeightProbe | None:
        """Return what is said of the texts before the first batch is trained on; None at later calls."""
        if self._has_begun:
            return None
        self._has_begun = True
        probe: WeightProbe | None = await self._trainer.call("begin_probes", self._precision, *packed_batch(batch))
        return probe

    async def take(self) -> WeightProbe | None:
        """Return what the trainer says now; None before there are texts."""
        if not self._has_begun:
            return None
        probe: WeightProbe | None = await self._trainer.call("take_probe")
        return probe


class RemoteUpdates:
    """Fits what a warm-up asks of :class:`rollfeed.training.supervised.SupervisedUpdates`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def update(self, demonstrations: Sequence[Demonstration]) -> float:
        """Make one update; return the loss before it, in nats a token."""
        loss: float = self._ask("supervise", list(demonstrations))
        return loss


def packed_batch(batch: TrainBatch) -> tuple[Any, ...]:
    """Return what the trainer needs of a batch, its groups as the run directory has them."""
    groups = [encode(group) for group in batch.groups]
    return batch.step, batch.policy_version, groups, batch.advantages_S, batch.penalties_S
