"""One of the processes that train a run's model together; all of them are called alike."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed.app.inside_cluster.trainer_worker import TrainerWorker
from rollfeed.base.cores import num_physical_cores
from rollfeed.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class RankWorker(TrainerWorker):
    """The trainer's worker where weights and states go through folders of this host."""

    async def load(self, folder: Path) -> int:
        """Go to the state in a folder; return the number of batches trained on.

        Raises:
            CheckpointError: If it cannot be read, or is of another model.
        """
        await self._do(lambda: self._trainer.load(folder))
        return self._trainer.step

    async def save(self, folder: Path) -> str | None:
        """Write the state as a new folder; return why it cannot be written, which rank 0 alone finds."""
        return await self._do(lambda: _refusal(self._trainer.save, folder))

    async def write_weights(self, folder: Path) -> str | None:
        """Write the weights as files into a folder; return why they cannot be written, which rank 0 alone finds."""
        return await self._do(lambda: _refusal(self._trainer.write_weights, folder))

    async def write_adapter(self, folder: Path, base: Path) -> str | None:
        """Write the adapter alone into a folder; return why it cannot be written, which rank 0 alone finds."""
        from rollfeed.training.ranks import write_adapter

        adapter, ranks = self._trainer.adapter, self._ranks
        assert adapter is not None
        assert ranks is not None
        return await self._do(lambda: _refusal(partial(write_adapter, adapter, base=base, ranks=ranks), folder))

    async def give_memory_back(self) -> None:
        """Leave the memory that PyTorch keeps for later to others on the GPU."""
        import torch

        await self._do(torch.cuda.empty_cache)

    def _open(self) -> None:
        from rollfeed.training.ranks import Ranks

        train = self._settings.train
        device = _device_of_rank(train.device)
        self._ranks = ranks = Ranks.join(device, timeout_seconds=train.process_timeout_seconds)
        ranks.check_alike(_facts(self._settings.model_dump_json()))
        threads = max(1, (train.threads or num_physical_cores()) // ranks.size)
        own = train.model_copy(update={"device": str(device), "threads": threads})
        self._settings = self._settings.model_copy(update={"train": own})
        super()._open()


def _device_of_rank(name: str) -> torch.device:
    """Return this rank's device: the processor, or a GPU each from the named one on."""
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    first = torch.device(name).index or 0 if name != "auto" else 0
    return torch.device("cuda", first + int(os.environ["LOCAL_RANK"]))


def _facts(settings: str) -> dict[str, str]:
    """Return what all ranks have to have alike."""
    facts = {"the settings": hashlib.sha256(settings.encode()).hexdigest()[:12]}
    for package in ("rollfeed", "torch", "transformers", "peft"):
        try:
            facts[f"the version of {package}"] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _refusal(write: Callable[[Path], None], folder: Path) -> str | None:
    try:
        write(folder)
    except CheckpointError as error:
        return str(error)
    return None
