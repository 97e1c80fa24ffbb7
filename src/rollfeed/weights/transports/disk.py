"""Weights through a folder that servers read."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollfeed.errors import CheckpointError, EngineProtocolError
from rollfeed.protocols import MetServer, TransportContext
from rollfeed.types import FolderUpdate, TensorUpdate
from rollfeed.weights.writing import write_some

KEPT_FOLDERS = 2
"""A server that comes back late loads the last one; the one before may still be being read."""


class DiskTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: writes a checkpoint folder for every update.

    Without a folder of the user's, folders are temporary, which is enough for servers on this machine. Configuration
    and tokenizer of ``checkpoint`` go with the weights.
    """

    def __init__(self, folder: Path | None = None, checkpoint: Path | None = None, untied_head: bool = False) -> None:
        self._given = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._checkpoint = checkpoint
        self._untied_head = untied_head
        self._written: list[Path] = []

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
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"version-{policy_version}-", dir=self._root()))
            folder.chmod(0o755)
            write_some(tensors, folder, checkpoint=self._checkpoint, untied_head=self._untied_head)
        except (OSError, CheckpointError) as error:
            raise EngineProtocolError(f"weights of version {policy_version} cannot be written: {error}") from error
        self._written.append(folder)
        while len(self._written) > KEPT_FOLDERS:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        return folder

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _root(self) -> Path:
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            return self._given.resolve()
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rollfeed-weights-")
        return Path(self._temporary.name)
