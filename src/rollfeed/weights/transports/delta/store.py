"""The versions that a receiver holds: checkpoint folders beside each other, the newest two.

A folder is put together under a name with a dot and renamed when its checksums are right, so that one with a
name of its own is whole: whatever ends this process leaves the older ones as they were.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from pathlib import Path
from typing import IO

import msgspec

from rollfeed.base.atomic import temporary_path
from rollfeed.errors import ConfigError
from rollfeed.weights.transports.delta.encoding import UNREADABLE, DamagedError
from rollfeed.weights.transports.delta.files import (
    CheckpointPieces,
    DeltaTable,
    Sums,
    apply_delta,
    digest_of,
    read_delta,
)

logger = logging.getLogger(__name__)

_KEPT_VERSIONS = 2
"""A server may still be reading the one before."""
_SUMS_SUFFIX = ".checksums"


class OtherBaseError(ValueError):
    """A delta changes a folder that is not here."""


class HeldVersion(msgspec.Struct, frozen=True):
    """A version that is here."""

    policy_version: int
    digest: str
    folder: str


class _Stored(msgspec.Struct, frozen=True):
    policy_version: int
    received_at: float
    sums: Sums


class CheckpointStore:
    """Holds the newest versions in a folder of its own; one process at a time. Belongs to one thread at a time.

    ``root`` is made if it is not there.

    Raises:
        ConfigError: If another process has it, or it cannot be used.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._root)
            self._held = self._found()
        except OSError as error:
            raise ConfigError(f"{root}: cannot be used for weights ({error.strerror or error})") from error

    @property
    def held(self) -> list[HeldVersion]:
        """The versions whose folders are there, the newest last."""
        return [held for held in self._held if os.path.isdir(held.folder)]

    def close(self) -> None:
        """Let another process have the folder; what is in it stays."""
        self._lock.close()

    def incoming(self) -> Path:
        """Return a path for a delta on its way; what a killed process has left there is removed at the next start."""
        return self._root / f".incoming-{time.monotonic_ns()}"

    def receive(self, delta: Path) -> HeldVersion:
        """Make the folder that a delta tells of, unless it is here.

        Raises:
            OtherBaseError: If it changes a folder that is not here.
            DamagedError: If it is not whole, or something else comes out.
            OSError: If there is no room for it; the older versions are as they were.
        """
        table = read_delta(delta)
        for held in self.held:
            if (held.policy_version, held.digest) == (table.policy_version, table.digest):
                return held
        bases = [Path(held.folder) for held in self.held if held.digest == table.base]
        if table.base is not None and not bases:
            known = ", ".join(f"{held.policy_version} ({held.digest[:8]})" for held in self.held) or "none"
            raise OtherBaseError(
                f"version {table.policy_version} changes weights {table.base[:8]}, and the versions here are {known}: "
                "send all of it"
            )
        return self._keep(table, delta, CheckpointPieces(bases[0]) if bases else None)

    def _keep(self, table: DeltaTable, delta: Path, base: CheckpointPieces | None) -> HeldVersion:
        folder = self._root / f"version-{table.policy_version:06}-{table.digest[:8]}"
        working = temporary_path(folder)
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        try:
            sums = apply_delta(delta, table, base, working)
            stored = _Stored(table.policy_version, time.time(), sums)
            folder.with_suffix(_SUMS_SUFFIX).write_bytes(msgspec.msgpack.encode(stored))
            working.rename(folder)
        except BaseException:
            shutil.rmtree(working, ignore_errors=True)
            raise
        made = HeldVersion(table.policy_version, table.digest, str(folder))
        held = self.held
        if held and held[-1].policy_version >= made.policy_version:
            logger.warning(
                "version %d comes after %d: a training has gone back, or two publishers use this receiver",
                made.policy_version,
                held[-1].policy_version,
            )
        self._held = self._kept([*held, made])
        return made

    def _kept(self, held: list[HeldVersion]) -> list[HeldVersion]:
        for old in held[:-_KEPT_VERSIONS]:
            _remove(Path(old.folder))
        return held[-_KEPT_VERSIONS:]

    def _found(self) -> list[HeldVersion]:
        """Return the versions that are whole, and remove what a process that was killed has left."""
        found: list[tuple[float, HeldVersion]] = []
        for path in self._root.glob(".*"):
            if path.name.startswith((".version-", ".incoming-")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self._root.glob(f"version-*{_SUMS_SUFFIX}"):
            folder = path.with_suffix("")
            try:
                stored = msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
                is_whole = folder.is_dir() and CheckpointPieces(folder).sums() == stored.sums
            except (OSError, DamagedError, *UNREADABLE):
                is_whole = False
            if is_whole:
                held = HeldVersion(stored.policy_version, digest_of(stored.sums), str(folder))
                found.append((stored.received_at, held))
            else:
                logger.warning("%s is not whole, and is removed: its publisher sends all of it again", folder)
                _remove(folder)
        return self._kept([held for _, held in sorted(found, key=lambda each: each[0])])


def _remove(folder: Path) -> None:
    folder.with_suffix(_SUMS_SUFFIX).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _locked(root: Path) -> IO[bytes]:
    lock = (root / ".lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"{root}: another process receives weights there; give each receiver its own folder"
        ) from None
    return lock
