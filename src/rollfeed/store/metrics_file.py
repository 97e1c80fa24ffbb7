"""metrics.jsonl: one line a committed step, for people and scripts to follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollfeed.store.atomic import replace_file
from rollfeed.store.json_text import metrics_line
from rollfeed.store.step_log import StepRecord


class MetricsFile:
    """A tracker that appends to metrics.jsonl.

    The records of the committed steps are the original: opening the file gives it one line for each of
    them, whatever an interrupted process left.
    """

    def __init__(self, path: Path, *, committed: Sequence[StepRecord]) -> None:
        expected = "".join(metrics_line(record.step, record.metrics) for record in committed).encode()
        if not path.exists() or path.read_bytes() != expected:
            replace_file(path, lambda file: file.write(expected))
        self._file = path.open("ab")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append the line of a step."""
        self._file.write(metrics_line(step, metrics).encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()
