"""The result of recounting a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

MOST_DISCREPANCIES = 1000
"""That are held whole; the others are counted."""


class Recounted(StrEnum):
    """The parts of a run that are recounted."""

    BYTES = "bytes"
    """Files against their digests, rows of the journal against their seals."""
    LEDGER = "ledger"
    """Every prompt that was drawn ends exactly once."""
    NUMBERS = "numbers"
    """Accounts and metrics against the batches."""
    VERSIONS = "versions"
    MASKS = "masks"
    """As lint finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discrepancy:
    """One thing that is not as it was written, or does not add up."""

    kind: Recounted
    place: str
    """A file below the run's directory, or a step."""
    detail: str
    step: int | None = None


@dataclass(slots=True, kw_only=True)
class Verification:
    """All that has been looked at, and what is wrong with it."""

    directory: Path
    num_steps: int = 0
    num_files: int = 0
    """That are as they were written."""
    num_bytes: int = 0
    """Of these files."""
    num_samples: int = 0
    by_kind: Counter[Recounted] = field(default_factory=Counter)
    found: list[Discrepancy] = field(default_factory=list)
    """The first :data:`MOST_DISCREPANCIES`."""
    not_vouched: list[str] = field(default_factory=list)
    """Files without a digest: of earlier versions, or newer than the last commit."""
    not_covered: list[str] = field(default_factory=list)
    """Files that nothing reads again: logs, curves, what others have put there."""
    unchecked: list[str] = field(default_factory=list)
    """What could not be recounted, and why."""
    last_good: int | None = None
    """The last step that is whole, with all before it."""

    def add(self, kind: Recounted, place: str, detail: str, *, step: int | None = None) -> None:
        """Note a discrepancy."""
        self.by_kind[kind] += 1
        if len(self.found) < MOST_DISCREPANCIES:
            self.found.append(Discrepancy(kind=kind, place=place, detail=detail, step=step))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        names = ("num_steps", "num_files", "num_bytes", "num_samples", "not_vouched", "not_covered", "unchecked")
        found = [{name: getattr(each, name) for name in Discrepancy.__slots__} for each in self.found]
        return {
            "directory": str(self.directory),
            **{name: getattr(self, name) for name in names},
            "last_good": self.last_good,
            "by_kind": {kind.value: self.by_kind[kind] for kind in Recounted},
            "findings": found,
        }
