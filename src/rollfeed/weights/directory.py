"""A folder into which a trainer outside puts complete checkpoints.

Invariant: a version is reported only after its folder has been seen whole under its final name. What disappears
while it is looked at, because a trainer prunes old checkpoints, counts as not there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rollfeed.config.paths import expand_path
from rollfeed.errors import CheckpointError, ConfigError, RunFailedError
from rollfeed.types import WeightProbe
from rollfeed.weights.checkpoints import check_complete, read_probe, version_of

_log = logging.getLogger(__name__)

MOST_JUMP = 1_000_000
"""From one version to the next that is there: versions count batches."""
AGAIN_SECONDS = (2.0, 10.0, 60.0)
"""After each refusal by the engine but the last: what it lacked, a file or a connection, may be there then."""
_TOLD_NAMES = 3
"""In an error: the trainer's user knows the others by then."""


class Ignored(StrEnum):
    """Why an entry of the folder is not a version."""

    TEMPORARY = "temporary"
    """Still being written, by its name."""
    FOREIGN = "foreign"
    """No folder, or no number at the end of its name."""
    INCOMPLETE = "incomplete"
    """Named like a version, but not a whole checkpoint."""
    DUPLICATE = "duplicate"
    """Of a version that another folder has, too."""
    IMPLAUSIBLE = "implausible"
    """So far above the last version that no later one would ever count."""
    REFUSED = "refused"
    """The engine has not taken it."""


class _Look(NamedTuple):
    """What a complete folder was like when it was read: not read again as long as it is so."""

    name: str
    inode: int
    changed_ns: int


class _Refusal(NamedTuple):
    why: str
    number: int
    """Of how many the folder has had."""
    again_at: float
    """On the monotonic clock."""


class WeightDirectory:
    """Finds the newest complete checkpoint of a folder; the folder need not be there yet.

    Every look lists the folder and reads at most the headers of what is newer than the last one found. A name that
    is ignored is told of once in the log, and again only after it had gone.

    Args:
        path: The folder. Folders in it are versions by the number at the end of their names.
        poll_seconds: Between two looks of :meth:`wait_for`.
        again_seconds: After which a version is found again that the engine has refused, each time.

    Raises:
        ConfigError: If ``path`` is something else than a folder.
    """

    def __init__(
        self, path: Path | str, *, poll_seconds: float, again_seconds: Sequence[float] = AGAIN_SECONDS
    ) -> None:
        self.path = Path(expand_path(str(path))).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"weights.directory = {str(path)!r}: not a folder; name the one with the checkpoints")
        self._poll_seconds = poll_seconds
        self._again_seconds = (*again_seconds, math.inf)
        # Looks run in threads, and one may overtake another; the lock guards what they remember.
        self._lock = threading.Lock()
        self._ignored: dict[str, tuple[Ignored, str]] = {}
        self._last: _Look | None = None
        self._refused: dict[_Look, _Refusal] = {}
        self._newest_version = 0

    def newest(self) -> tuple[int, Path] | None:
        """Return the highest version that is complete, and its folder; None where there is none.

        It reads the disk: call it in a thread where that may take time.

        Raises:
            RunFailedError: If the folder is there and cannot be listed.
        """
        with self._lock:
            ignored: dict[str, tuple[Ignored, str]] = {}
            found = None
            for version, name in self._candidates(ignored):
                if found is not None:
                    if version == found[0]:
                        ignored[name] = (Ignored.DUPLICATE, f"version {version} is also {found[1].name}, which is used")
                    continue
                if self._is_complete(name, ignored):
                    found = version, self.path / name
                    self._newest_version = version
            self._tell(ignored)
            return found

    async def wait_for(self, version: int, *, timeout_seconds: float) -> tuple[int, Path]:
        """Return the newest complete version as soon as it is at least ``version``.

        Raises:
            RunFailedError: If it does not come in time; says what was there instead.
        """
        loop = asyncio.get_running_loop()
        given_up_at = loop.time() + timeout_seconds
        while True:
            newest = await asyncio.to_thread(self.newest)
            if newest is not None and newest[0] >= version:
                return newest
            remaining_seconds = given_up_at - loop.time()
            if remaining_seconds <= 0:
                raise RunFailedError(
                    f"weights of version {version} have not come within {timeout_seconds:g} s: {self._state(newest)}: "
                    "see whether the trainer runs and writes there, or raise weights.timeout_seconds"
                )
            await asyncio.sleep(min(self._poll_seconds, remaining_seconds))

    def refuse(self, folder: Path, why: str) -> None:
        """Pass over a version for a while, and say why; after the last one until its folder has changed."""
        with self._lock, suppress(FileNotFoundError):
            look = _look(folder)
            number = self._refused[look].number + 1 if look in self._refused else 0
            waits = self._again_seconds[min(number, len(self._again_seconds) - 1)]  # two looks may have found it
            self._refused[look] = _Refusal(why, number, time.monotonic() + waits)

    def probe(self, folder: Path) -> WeightProbe | None:
        try:
            return read_probe(folder)
        except CheckpointError:  # it was whole when it was found, and is being removed
            return None

    def _candidates(self, ignored: dict[str, tuple[Ignored, str]]) -> list[tuple[int, str]]:
        """Return what is named like a version, the highest first."""
        found: list[tuple[int, str]] = []
        for name, is_folder in self._listing():
            version = version_of(name)
            if name.startswith(".") or name.endswith(".tmp"):
                ignored[name] = (Ignored.TEMPORARY, "still being written, by its name")
            elif not is_folder:
                ignored[name] = (Ignored.FOREIGN, "not a folder")
            elif version is None:
                ignored[name] = (Ignored.FOREIGN, "no version number at the end of its name")
            elif version > self._newest_version + MOST_JUMP:
                told = f"version {version} is more than {MOST_JUMP} above version {self._newest_version}"
                ignored[name] = (Ignored.IMPLAUSIBLE, f"{told}: number folders by the batches that were trained")
            else:
                found.append((version, name))
        return sorted(found, key=lambda candidate: (-candidate[0], candidate[1]))

    def _listing(self) -> list[tuple[str, bool]]:
        try:
            with os.scandir(self.path) as entries:
                return sorted((entry.name, _is_folder(entry)) for entry in entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFailedError(
                f"weights.directory = {str(self.path)!r}: cannot be listed ({error.strerror or error}): "
                "make it readable for this process"
            ) from error

    def _is_complete(self, name: str, ignored: dict[str, tuple[Ignored, str]]) -> bool:
        folder = self.path / name
        try:
            look = _look(folder)
            if (refusal := self._refused.get(look)) is not None and time.monotonic() < refusal.again_at:
                ignored[name] = (Ignored.REFUSED, refusal.why)
                return False
            if look != self._last:
                check_complete(folder)
                self._last = look
        except FileNotFoundError:
            return False
        except (CheckpointError, OSError) as error:
            if folder.is_dir():
                ignored[name] = (Ignored.INCOMPLETE, str(error))
            return False
        return True

    def _tell(self, ignored: dict[str, tuple[Ignored, str]]) -> None:
        for name, (reason, why) in ignored.items():
            known = self._ignored.get(name)
            if known is not None and known[0] is reason:
                continue
            # A temporary name is how every checkpoint begins, and nothing to be warned of.
            level = logging.DEBUG if reason is Ignored.TEMPORARY else logging.WARNING
            _log.log(level, "%s: not taken as weights: %s", self.path / name, why)
        self._ignored = ignored

    def _state(self, newest: tuple[int, Path] | None) -> str:
        if not self.path.is_dir():
            return f"there is no folder {self.path}"
        has = "no complete version" if newest is None else f"version {newest[0]} ({newest[1].name}) as its newest"
        with self._lock:
            told = [f"{name}: {why}" for name, (_, why) in self._ignored.items()]
        more = [f"{len(told) - _TOLD_NAMES} more"] if len(told) > _TOLD_NAMES else []
        others = "; ".join([*told[:_TOLD_NAMES], *more])
        return f"{self.path} has {has}" + (f", and ignored are {others}" if others else "")


def _look(folder: Path) -> _Look:
    stat = folder.stat()
    return _Look(folder.name, stat.st_ino, stat.st_mtime_ns)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads nowhere, for one
        return False
