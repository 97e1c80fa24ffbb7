"""steps.jsonl: the account of each committed step, a line a step; and metrics.jsonl, which is derived from it.

The journal says where the line of a step ends and what its checksum is; what stands behind the last
of them is not committed.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import open_regular, replace_file
from rollfeed.errors import RunDirectoryError
from rollfeed.store.journal import Journal, StepEntry
from rollfeed.store.json_text import finite, to_json
from rollfeed.store.layout import STEPS
from rollfeed.types import LedgerCounts
from rollfeed.types.fields import from_dict, to_dict


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The account of one committed step."""

    step: int
    policy_version: int
    num_groups: int
    num_samples: int
    num_dropped: int
    response_tokens: int
    """Of the groups that were kept."""
    metrics: Mapping[str, float]
    """Flat names; NaN where the value was not finite."""
    drop_reasons: Mapping[str, int]
    """Groups by reason."""
    wasted_tokens: Mapping[str, int]
    """Response tokens that will not be trained on, by reason."""
    ledger: LedgerCounts

    @property
    def seconds(self) -> float:
        """From the batch before to this one; of runs from before there was this number, those of the step."""
        return self.metrics.get("time/total_seconds", self.metrics.get("perf/step_seconds", 0.0))


_OF_SET = {"accuracy", "accuracy_low", "accuracy_high", "reward_mean", "response_length_mean", "truncated_ratio"}


class StepLog:
    """The file as the process that works on the run appends to it."""

    def __init__(self, directory: Path, committed: Sequence[StepEntry]) -> None:
        self._end = committed[-1].record_end if committed else 0
        """Where the last committed line ends."""
        descriptor = os.open(directory / STEPS, os.O_RDWR | os.O_CREAT, 0o644)
        self._file = os.fdopen(descriptor, "r+b")
        self._file.truncate(self._end)

    def append(self, record: StepRecord) -> tuple[int, int]:
        """Put a line behind the committed ones, flushed to disk; return where it ends and its checksum.

        Until :meth:`committed` says that it counts, the next call overwrites it.
        """
        line = _line(record)
        self._file.seek(self._end)
        self._file.truncate()
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._end + len(line), zlib.crc32(line)

    def committed(self, entry: StepEntry) -> None:
        """Go on behind the line of this step."""
        self._end = entry.record_end

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


class MetricsFile:
    """A tracker that appends to metrics.jsonl, for people and scripts to follow.

    The records of the committed steps are the original: opening the file gives it one line for each of
    them, whatever an interrupted process left.
    """

    def __init__(self, path: Path, *, committed: Sequence[StepRecord]) -> None:
        expected = b"".join(_metrics_line(record.metrics, record.step) for record in committed)
        if not path.exists() or path.read_bytes() != expected:
            replace_file(path, lambda file: file.write(expected))
        self._file = path.open("ab")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append the line of a step."""
        self._file.write(_metrics_line(metrics, step))
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def metrics_problem(path: Path, committed: Iterable[StepRecord], *, is_ended: bool) -> str | None:
    """Return why metrics.jsonl is not what the accounts say; None if it is.

    Where the run has not ended, the last line may be missing: a kill, or a full disk, can come before it.
    """
    try:
        with open_regular(path) as file:
            steps = iter(committed)
            for record in steps:
                expected = _metrics_line(record.metrics, record.step)
                if (line := file.readline()) != expected:
                    is_cut_short = expected.startswith(line) and next(steps, None) is None
                    return None if is_cut_short and not is_ended else f"has other figures of step {record.step}"
            more = file.read(80)
            return f"has lines of steps that the journal does not have: {more!r}" if more else None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def is_update_record(record: Any) -> bool:
    """Whether a line of train.jsonl is what a trainer writes of a batch."""
    return _has_step(record) and all(_is_number(each) for name, each in record.items() if name.startswith("train/"))


def is_evaluation_record(record: Any) -> bool:
    """Whether a line of eval.jsonl is what an evaluation writes."""
    is_whole = _has_step(record) and isinstance(record.get("sets"), dict)
    return is_whole and all(isinstance(each, dict) and each.keys() >= _OF_SET for each in record["sets"].values())


def _has_step(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("step"), int)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def read_steps(
    directory: Path, journal: Journal, *, is_asked: Callable[[int], bool] | None = None
) -> tuple[StepRecord, ...]:
    """Return the records of the committed steps, in order; with ``is_asked`` of those only for which it is true.

    Raises:
        RunDirectoryError: If the file is missing or damaged.
    """
    entries = journal.steps()
    while True:
        try:
            return read_records_of(directory / STEPS, entries, is_asked)
        except RunDirectoryError:
            # Another process may just have gone back to an earlier step.
            before, entries = entries, journal.steps()
            if entries == before:
                raise


def read_records_of(
    path: Path, entries: Sequence[StepEntry], is_asked: Callable[[int], bool] | None
) -> tuple[StepRecord, ...]:
    """Return the records of ``entries``, which are all committed steps; otherwise as :func:`read_steps`."""
    return tuple(records_of(path, entries, is_asked))


def records_of(
    path: Path, entries: Sequence[StepEntry], is_asked: Callable[[int], bool] | None = None
) -> Iterator[StepRecord]:
    """Yield what :func:`read_records_of` returns, one after the other."""
    if not entries:
        return
    start = 0
    try:
        with open_regular(path) as file:
            for entry in entries:
                if is_asked is None or is_asked(entry.step):
                    file.seek(start)
                    yield _record(_checked(file.read(entry.record_end - start), entry))
                start = entry.record_end
    except FileNotFoundError:
        raise RunDirectoryError(f"{path}: is missing; restore the run directory from a copy") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"{path}: is damaged: {error}; restore the run directory from a copy") from error


def _checked(line: bytes, entry: StepEntry) -> dict[str, Any]:
    if zlib.crc32(line) != entry.record_checksum:
        raise ValueError(f"the line of step {entry.step} has a wrong checksum")
    values: dict[str, Any] = json.loads(line)
    return values


def _metrics_line(metrics: Mapping[str, float], step: int) -> bytes:
    return (to_json(finite({"step": step, **metrics}), "metrics") + "\n").encode()


def _line(record: StepRecord) -> bytes:
    values = {**to_dict(record), "metrics": finite(record.metrics)}
    return (to_json(values, f"the account of step {record.step}") + "\n").encode()


def _record(values: dict[str, Any]) -> StepRecord:
    metrics = {name: math.nan if value is None else value for name, value in values["metrics"].items()}
    return from_dict(StepRecord, {**values, "metrics": metrics})
