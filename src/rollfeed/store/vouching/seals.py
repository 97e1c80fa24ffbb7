"""Seals of the journal's rows: a digest of each, over the one before, so that none can change, go or come unnoticed.

The seal of the run's row is over that of the last step: a row less is another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from rollfeed.base.atomic import Digest

OF_RUN = -1
"""Stands in place of a step for what belongs to none."""
_Row: TypeAlias = tuple[Any, ...]


class Rows(NamedTuple):
    """All rows of a journal, as sqlite has them."""

    run: _Row
    steps: Sequence[_Row]
    """In order."""
    changes: Sequence[_Row]
    vouched: Sequence[_Row] | None
    """Step, digests of files as JSON, seal; None in a journal of before there were seals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """Digests of files that a journal has."""

    steps: Mapping[int, Mapping[str, Digest]] = field(default_factory=dict)
    """Of each step, by folder; of a file that grows by its name: that of its beginning, as long as it was then. Empty
    for a step that an earlier version made."""
    run: Mapping[str, Digest] = field(default_factory=dict)
    """Of files that belong to no step, by name."""

    def of_growing(self, name: str) -> dict[int, Digest]:
        """Return what is known of a file that grows, by step, from shorter to longer."""
        found = {step: files[name] for step, files in sorted(self.steps.items()) if name in files}
        return {**found, OF_RUN: self.run[name]} if name in self.run else found


def files_text(files: Mapping[str, Digest]) -> str:
    """Return digests as the journal stores them."""
    return json.dumps(files)


def files_of(text: str) -> dict[str, Digest]:
    """Return the digests in what :func:`files_text` returned."""
    return {name: Digest(*digest) for name, digest in json.loads(text).items()}


def chained(before: bytes, step_row: _Row, files: str) -> bytes:
    """Return the seal of a step, given that of the step before; empty bytes stand before the first."""
    return _seal(before, step_row, files)


def seal_of_run(run: _Row, changes: Sequence[_Row], files: str, last: bytes) -> bytes:
    """Return the seal of the run's row and its changes, given that of the last step."""
    return _seal(last, run, changes, files)


def vouched_by(rows: Rows) -> Vouched:
    """Return the digests that a journal has.

    Raises:
        ValueError: If a row is not as it was written.
    """
    if rows.vouched is None:
        return Vouched()
    stored = {step: (files, seal) for step, files, seal in rows.vouched}
    of_run = stored.pop(OF_RUN, None)
    if of_run is None or stored.keys() != {row[0] for row in rows.steps}:
        raise ValueError("steps and their seals do not belong together")
    last, vouched = b"", {}
    for row in rows.steps:
        files, seal = stored[row[0]]
        last = chained(last, row, files)
        if seal != last:
            raise ValueError(f"the row of step {row[0]} is not as it was written")
        vouched[row[0]] = files_of(files)
    if of_run[1] != seal_of_run(rows.run, rows.changes, of_run[0], last):
        raise ValueError("the row of the run, or of a change in its settings, is not as it was written")
    return Vouched(steps=vouched, run=files_of(of_run[0]))


def _seal(before: bytes, *values: Any) -> bytes:
    return hashlib.sha256(before + msgspec.msgpack.encode(values)).digest()
