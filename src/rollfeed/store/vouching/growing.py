"""Digests of files that a trainer appends to, line by line, while steps are committed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollfeed.base.atomic import Digest, digests_of_beginnings, open_regular
from rollfeed.store.layout import GROWING_FILES


class GrowingFiles:
    """Follows the files, and knows the digest of each as long as it is; from its beginning once a process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = {name: (0, hashlib.sha256()) for name in GROWING_FILES}

    def digests(self) -> dict[str, Digest]:
        """Return the digests of the files that are there, up to their last whole lines.

        Raises:
            OSError: If one cannot be read.
        """
        found = {}
        for name, (start, digest) in self._read.items():
            try:
                with open_regular(self._directory / name) as file:
                    file.seek(start)
                    lines = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue
            digest.update(b"".join(lines[:2]))
            end = start + len(lines[0]) + len(lines[1])
            self._read[name] = end, digest
            found[name] = Digest(end, digest.hexdigest())
        return found


def num_whole(path: Path, known: Sequence[Digest]) -> int:
    """Return how many digests, from the shortest on, are of what a file begins with; it is read once."""
    count = 0
    with suppress(OSError):
        for found, expected in zip(digests_of_beginnings(path, [each.size for each in known]), known, strict=True):
            if found != expected:
                break
            count += 1
    return count
