"""Weights through a folder that servers read."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.errors import CheckpointError, EngineProtocolError
from rollfeed.protocols import MetServer, TransportContext
from rollfeed.types import FolderUpdate, TensorUpdate
from rollfeed.weights.home import VersionsHome
from rollfeed.weights.writing import write_some


class DiskTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: writes a checkpoint folder for every update.

    Without a folder of the user's, folders are temporary, which is enough for servers on this machine. Configuration
    and tokenizer of ``checkpoint`` go with the weights. A version has its name when it is whole. Nothing is forced to
    the disk: servers read what is written, and after a loss of power nobody asks for it.
    """

    def __init__(self, folder: Path | None = None, checkpoint: Path | None = None, untied_head: bool = False) -> None:
        self._home = VersionsHome(folder)
        self._numbers = itertools.count(1)
        self._checkpoint = checkpoint
        self._untied_head = untied_head

    @classmethod
    def made_for(cls, context: TransportContext) -> DiskTransport:
        """Return the transport of a servers' table."""
        return cls(context.folder, context.checkpoint, context.untied_head)

    def meet(self, servers: Sequence[MetServer]) -> None:
        del servers

    async def stage(self, update: TensorUpdate) -> FolderUpdate:
        folder = await asyncio.to_thread(self.write, update.tensors, policy_version=update.policy_version)
        return FolderUpdate(folder, policy_version=update.policy_version)

    def write(self, tensors: Mapping[str, Any], *, policy_version: int) -> Path:
        """Write tensors, all numpy or all torch, and return the folder.

        Raises:
            EngineProtocolError: If they cannot be written.
        """
        root = self._home.path
        writing = root / f".version-{policy_version}.writing"
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            write_some(tensors, writing, checkpoint=self._checkpoint, untied_head=self._untied_head)
            # A version may be published twice, and no name stands for two folders.
            folder = writing.rename(root / f"version-{policy_version}-{next(self._numbers)}")
        except (OSError, CheckpointError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            remedy = f"; make room in {root}, or set weights_folder" if isinstance(error, OSError) else ""
            raise EngineProtocolError(
                f"weights of version {policy_version} cannot be written: {error}{remedy}"
            ) from error
        self._home.keep(folder)
        return folder

    def close(self) -> None:
        self._home.close()
