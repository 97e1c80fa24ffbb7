"""The trainer in several processes of this host, as the process of the run sees it.

Weights and states are files that the processes write and read together, so that none of them, nor this one, has to
hold another copy of the model beside its own part.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed.app.training.remote_trainer import RemoteTrainer
from rollfeed.cluster import Host
from rollfeed.errors import CheckpointError, RunFailedError
from rollfeed.weights.home import VersionsHome

if TYPE_CHECKING:
    from torch import Tensor

_MEMORY = Path("/dev/shm")
_ROOM = 2
"""Times the model in fp32 that there has to be room for: the old weights are there until the new ones are."""


class RankedTrainer(RemoteTrainer):
    """Fits what a training asks of a trainer, as :class:`RemoteTrainer`.

    Args:
        host: Of :class:`rollfeed.app.inside_cluster.rank_worker.RankWorker` objects, which are open.
        checkpoint: The folder that training begins with.
        where_it_goes_on: Says it for the message when the trainer is lost.
        has_adapter: Whether an adapter is what is trained.
        publishes_adapter: Whether servers are given that alone.
    """

    def __init__(
        self,
        host: Host,
        *,
        checkpoint: Path,
        where_it_goes_on: Callable[[], str | None],
        has_adapter: bool,
        publishes_adapter: bool,
    ) -> None:
        super().__init__(host, checkpoint=checkpoint, where_it_goes_on=where_it_goes_on)
        self._home: VersionsHome | None = None
        self._has_adapter, self._publishes_adapter = has_adapter, publishes_adapter

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights, in files of memory that this process maps and nobody else sees.

        Where an adapter is published alone they are handed over when somebody reads them.

        Raises:
            RunFailedError: If there is no room for them.
        """
        if self._publishes_adapter:
            return _WeightsBesideAdapter(self._handed_over, self.write_adapter)
        return self._handed_over()

    @property
    def adapter(self) -> RankedTrainer | None:
        """The trainer itself, which writes the adapter that is trained; None without one."""
        return self if self._has_adapter else None

    def write_adapter(self, folder: Path, *, base: Path) -> None:
        """Write the adapter alone, in peft's layout; ``base`` is the model's folder.

        Raises:
            OSError: If it cannot be written.
        """
        if (refusal := self._ask("write_adapter", folder.absolute(), base)) is not None:
            raise OSError(refusal)

    def _handed_over(self) -> dict[str, Tensor]:
        from rollfeed.training.ranks import read_weights

        if self._home is None:
            self._home = VersionsHome(_place(self.checkpoint))
        folder = Path(tempfile.mkdtemp(dir=self._home.path))
        try:
            if (refusal := self._ask("write_weights", folder)) is not None:
                raise RunFailedError(f"the trainer's weights cannot be handed over: {refusal}")
            return read_weights(folder)
        finally:
            # What is mapped is there until nobody has it any more, and gone when this process is killed.
            shutil.rmtree(folder, ignore_errors=True)

    def save(self, folder: Path) -> None:
        """Write the state as a new folder."""
        if (refusal := self._ask("save", folder.absolute())) is not None:
            raise CheckpointError(refusal)

    def load(self, folder: Path) -> None:
        """Go to the state in a folder, of however many processes."""
        self.step, self.is_mid_batch = self._ask("load", folder.absolute()), False

    def give_memory_back(self) -> None:
        """Leave the memory that PyTorch keeps for later to others on the GPUs."""
        self._ask("give_memory_back")

    def close(self) -> None:
        """Remove what is left of files."""
        if self._home is not None:
            path = self._home.path
            self._home.close()
            shutil.rmtree(path, ignore_errors=True)


class _WeightsBesideAdapter(Mapping[str, "Tensor"]):
    """Merged weights where the adapter is published alone: nobody reads them but for an export, in a thread."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]], write_adapter: Callable[..., None]) -> None:
        self.write_adapter = write_adapter
        self._read = read

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        return self._read()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _place(checkpoint: Path) -> Path | None:
    """Return where files of a model are memory, if there is room for two; None for the temporary folder."""
    needed = _ROOM * 2 * sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    try:
        return _MEMORY if shutil.disk_usage(_MEMORY).free > needed else None
    except OSError:
        return None
