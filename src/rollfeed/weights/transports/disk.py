"""Weights through a folder that servers read."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
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
_PREFIX, _LOCK = "rollfeed-weights-", ".lock"


class DiskTransport:
    """Fits :class:`rollfeed.protocols.WeightTransport`: writes a checkpoint folder for every update.

    Without a folder of the user's, folders are temporary, which is enough for servers on this machine. Configuration
    and tokenizer of ``checkpoint`` go with the weights. A version has its name when it is whole. Nothing is forced to
    the disk: servers read what is written, and after a loss of power nobody asks for it.
    """

    def __init__(self, folder: Path | None = None, checkpoint: Path | None = None, untied_head: bool = False) -> None:
        self._given = folder
        self._home: Path | None = None
        self._lock: int | None = None
        """A file descriptor: it is let go of when the process ends, however it does."""
        self._numbers = itertools.count(1)
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
        root = self._root()
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
        self._written.append(folder)
        while len(self._written) > KEPT_FOLDERS:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
        return folder

    def close(self) -> None:
        if self._home is not None and self._given is None:
            shutil.rmtree(self._home, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._home = self._lock = None

    def _root(self) -> Path:
        """Return the folder of this process's versions, made and locked when it is first asked for."""
        if self._home is None:
            place = Path(tempfile.gettempdir()) if self._given is None else self._given
            try:
                place.mkdir(parents=True, exist_ok=True)
                _collect(place)
                home = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place.resolve()))
                home.chmod(0o755)
                self._lock = os.open(home / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise EngineProtocolError(
                    f"no weights can be written to {place}: {error}; set weights_folder to a folder that can be written"
                ) from error
            self._home = home
        return self._home


def _collect(place: Path) -> None:
    """Remove what processes have left that ended without a chance to: nobody holds its lock any more."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # it is in use, somebody else's, or just gone
            continue
