"""Reading a run directory, while the run goes on or long after.

Only committed steps are seen. Nothing is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

from rollfeed.errors import RunDirectoryError
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.store.journal import Journal, RunRecord, RunStatus, SettingChange, StepEntry
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import (
    BATCHES,
    DROPPED,
    EVAL_LOG,
    ISOLATION,
    JOURNAL,
    STATES,
    STEPS,
    TIMINGS,
    TRAIN_LOG,
    export_facts,
    export_folders,
)
from rollfeed.store.lock import is_held
from rollfeed.store.states import StateFiles
from rollfeed.store.step_log import (
    StepRecord,
    is_evaluation_record,
    is_update_record,
    read_records_of,
    read_steps,
    records_of,
)
from rollfeed.store.tables.parquet import (
    read_batch,
    read_columns,
    read_group_rows,
    read_groups,
    read_rows,
    read_timings,
)
from rollfeed.store.tables.summaries import SUMMARY_COLUMNS, GroupSummary, group_summary
from rollfeed.store.vouching import CheckedFiles, Vouched
from rollfeed.types import Dropped, Group, LedgerCounts, RunState, TrainBatch
from rollfeed.types.text import step_range

INTERRUPTED = "interrupted"
"""The status of a run that has not ended and that no process works on."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two looks; each is half as long again as the last


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroup:
    """One group whole, and what became of it."""

    step: int
    group: Group
    drop_reason: str | None
    """None when the group was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Sums over all committed steps."""

    num_steps: int
    num_groups: int
    num_samples: int
    num_dropped: int
    response_tokens: int
    wasted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A run at one moment, as :meth:`RunReader.follow` sees it."""

    status: RunStatus
    problem: str
    """The reason why there may be no more steps."""
    entries: Mapping[int, StepEntry] | None = None
    """The committed steps; None where they could not be read."""
    record: StepRecord | None = None
    """Of the step that was looked for, if it is committed."""


class RunReader:
    """A read-only view of a run directory; a context manager.

    With ``wait_seconds`` it waits so long for the run to begin.

    Raises:
        RunDirectoryError: If there is no run at ``path``, or its journal cannot be read; from all methods, if a step is
            not committed, or its files are missing or damaged.
    """

    def __init__(self, path: str | Path, *, wait_seconds: float = 0.0) -> None:
        path = Path(path)
        give_up_at = time.monotonic() + wait_seconds
        while not (path / JOURNAL).exists() and time.monotonic() < give_up_at:
            time.sleep(_SHORTEST_PAUSE)
        if not path.is_dir():
            found = "is not a directory" if path.exists() else "does not exist"
            raise RunDirectoryError(f"{path}: {found}; give the directory that `rollfeed run` wrote")
        if not (path / JOURNAL).exists():
            raise RunDirectoryError(
                f"{path}: is not a run directory: it has no {JOURNAL}; give the directory that `rollfeed run` wrote"
            )
        self.path = path
        self._journal = Journal(path / JOURNAL, read_only=True)
        self._files = CheckedFiles(path, lambda: self._journal.vouched())

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._journal.close()

    def run(self) -> RunRecord:
        """Return settings, identity, status and cause."""
        return self._journal.run()

    def changes(self) -> tuple[SettingChange, ...]:
        """Return what has been changed in the settings since the run began, in the order of steps."""
        return self._journal.changes()

    def evaluations(self) -> tuple[dict[str, Any], ...]:
        """Return what each evaluation found, in order; none where the run does not evaluate.

        Raises:
            RunDirectoryError: If the file cannot be read.
        """
        return tuple(self._records(EVAL_LOG, is_evaluation_record))

    def exports(self) -> dict[str, dict[str, Any]]:
        """Return the ``step`` of each model in exports/, and the number that was found of it; by its folder's name."""
        return {folder.name: export_facts(folder) for folder in export_folders(self.path)}

    def updates(self) -> dict[int, dict[str, Any]]:
        """Return the figures of each batch that was trained on, by its step; none where the run does not train.

        Raises:
            RunDirectoryError: If the file cannot be read.
        """
        return {record["step"]: record for record in self._records(TRAIN_LOG, is_update_record)}

    def _records(self, name: str, is_record: Callable[[Any], bool]) -> list[dict[str, Any]]:
        path = self._files.growing(name)
        try:
            records = read_records(path)
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error}") from error
        if not all(map(is_record, records)):
            raise RunDirectoryError(f"{path}: is damaged: not all lines are of a run; restore it from a copy")
        return records

    def isolation(self) -> Isolation | None:
        """Return at which isolation level programs of the policy ran, or None when none did.

        Raises:
            RunDirectoryError: If the record of it is damaged.
        """
        path = self._files.of_run(ISOLATION)
        try:
            record = json.loads(path.read_bytes())
            return Isolation(**{**record, "level": IsolationLevel(record["level"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error}; without this file the rest is shown") from error

    def records(self) -> Iterator[StepRecord]:
        """Yield what :meth:`steps` returns, in memory that does not grow with their number."""
        return records_of(self.path / STEPS, self._journal.steps())

    def step_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the committed steps, in order."""
        return tuple(entry.step for entry in self._journal.steps())

    def vouched(self) -> Vouched:
        """Return the digests that the journal has of files."""
        return self._journal.vouched()

    def file(self, folder: str, step: int) -> Path:
        """Return the file that a committed step has in a folder, as it was written."""
        return self._files.of_step(folder, step)

    def status(self) -> str:
        """Return ``running``, ``interrupted``, ``finished`` or ``failed``."""
        status = self.run().status
        return INTERRUPTED if status is RunStatus.RUNNING and not is_held(self.path) else status.value

    def steps(self, is_asked: Callable[[int], bool] | None = None) -> tuple[StepRecord, ...]:
        """Return the committed steps, in order; with ``is_asked`` those only for which it is true."""
        return read_steps(self.path, self._journal, is_asked=is_asked)

    def step(self, step: int) -> StepRecord:
        """Return one committed step. Raises RunDirectoryError if it is not committed."""
        if found := self.steps(lambda each: each == step):
            return found[0]
        committed = [entry.step for entry in self._journal.steps()]
        have = f"it has {step_range(committed[0], committed[-1])}" if committed else "no step is committed yet"
        raise RunDirectoryError(f"{self.path}: has no step {step}; {have}")

    def follow(self, start: int = 0, *, patience_seconds: float = 60.0) -> Iterator[StepRecord]:
        """Yield the steps from ``start`` on, each as soon as it is committed, and end with the run.

        It looks at the journal at least once a second, and waits as long as a process works on the run. The other
        methods see what it has seen. A thread may take a step and another one the next.

        Args:
            start: The first step; one that is not there yet is waited for.
            patience_seconds: How long a run that was killed, or has failed, may take to be gone on with.

        Raises:
            RunDirectoryError: If nobody goes on with the run in this time; if it goes back behind a step that was
                yielded, or is replaced by another run.
            ValueError: If ``start`` is below 0.
        """
        if start < 0:
            raise ValueError(f"start = {start}: steps are counted from 0")
        seen: dict[int, StepEntry] = {}
        step, pause, give_up_at = start, _SHORTEST_PAUSE, inf
        while True:
            look = self._look(step)
            entries = seen if look.entries is None else look.entries
            if changed := [each for each in seen if entries.get(each) != seen[each]]:
                raise RunDirectoryError(
                    f"{self.path}: from step {changed[0]} on, steps that have been followed are gone or made again, as "
                    f"with --step or --overwrite: go on from what step {changed[0] - 1} left, with "
                    f"follow(start={changed[0]})"
                )
            if look.record is not None:
                seen[step] = entries[step]
                step, pause, give_up_at = step + 1, _SHORTEST_PAUSE, inf
                yield look.record
                continue
            if look.status == RunStatus.FINISHED:
                return
            is_made = look.entries is not None and is_held(self.path)
            give_up_at = inf if is_made else min(give_up_at, time.monotonic() + patience_seconds)
            if time.monotonic() >= give_up_at:
                raise RunDirectoryError(
                    f"{self.path}: step {step} has not come, and nobody has worked on the run for {patience_seconds:g} "
                    f"s: {look.problem}; `rollfeed run --resume {self.path}` goes on with it"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _look(self, step: int) -> _Look:
        try:
            # Opened again: what was opened while nobody wrote stays as it was then, and the run may be another one.
            journal = Journal(self.path / JOURNAL, read_only=True)
            self._journal.close()
            self._journal = journal
            run = journal.run()  # before the steps, as the last one comes before the end
            committed = journal.steps()
            entries = {entry.step: entry for entry in committed}
            record = next(iter(read_records_of(self.path / STEPS, committed, lambda each: each == step)), None)
        except RunDirectoryError as error:  # it is just being replaced, or steps are being removed
            return _Look(status=RunStatus.RUNNING, problem=str(error))
        problem = run.cause or f"it is {self.status()}"
        return _Look(status=run.status, problem=problem, entries=entries, record=record)

    def totals(self) -> RunTotals:
        """Return the sums over all committed steps."""
        steps = self.steps()
        return RunTotals(
            num_steps=len(steps),
            num_groups=sum(record.num_groups for record in steps),
            num_samples=sum(record.num_samples for record in steps),
            num_dropped=sum(record.num_dropped for record in steps),
            response_tokens=sum(record.response_tokens for record in steps),
            wasted_tokens=sum(sum(record.wasted_tokens.values()) for record in steps),
        )

    def ledger(self) -> LedgerCounts:
        """Return where every prompt drawn so far is, as of the last commit."""
        steps = self.steps()
        return steps[-1].ledger if steps else LedgerCounts()

    def state(self, step: int) -> RunState:
        """Return the state that a committed step left."""
        self.file(STATES, self.step(step).step)
        return StateFiles(self.path).read(next(entry for entry in self._journal.steps() if entry.step == step))

    def batch(self, step: int) -> TrainBatch:
        """Return the batch of a committed step, as it was delivered."""
        record = self.step(step)
        timings = read_timings(self.file(TIMINGS, step))
        return read_batch(self.file(BATCHES, step), metrics=record.metrics, timings=timings)

    def rows(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a committed step's batch by column, as they lie in its file; see docs/parquet.md."""
        return read_rows(self.file(BATCHES, self.step(step).step))

    def group_rows(self, *group_indices: int, step: int) -> dict[int, list[dict[str, Any]]]:
        """Return the rows of groups by column, kept or dropped, without those of timings; see docs/parquet.md.

        Raises:
            RunDirectoryError: If the step does not have one of them, or files are missing or damaged.
        """
        found: dict[int, list[dict[str, Any]]] = {}
        for folder in (BATCHES, DROPPED)[: 2 if self.step(step).num_dropped else 1]:
            if missing := [each for each in group_indices if each not in found]:
                found |= read_group_rows(self.file(folder, step), missing)
        for each in group_indices:
            if each not in found:
                raise RunDirectoryError(f"{self.path}: step {step} has no group {each}")
        return found

    def dropped(self, step: int) -> tuple[Dropped, ...]:
        """Return the groups that a committed step dropped."""
        if not self.step(step).num_dropped:
            return ()
        timings = read_timings(self.file(TIMINGS, step))
        found = read_groups(self.file(DROPPED, step), timings=timings)
        return tuple(Dropped(group=group, reason=str(reason)) for group, reason in found)

    def summaries(self, step: int) -> tuple[GroupSummary, ...]:
        """Return the kept and the dropped groups of a committed step, by group index; no tokens are read."""
        record = self.step(step)
        rows = read_columns(self.file(BATCHES, step), SUMMARY_COLUMNS)
        if record.num_dropped:
            rows += read_columns(self.file(DROPPED, step), (*SUMMARY_COLUMNS, "drop_reason"))
        groups = [group_summary(list(members)) for _, members in groupby(rows, key=lambda row: row["group_index"])]
        return tuple(sorted(groups, key=lambda group: group.group_index))

    def group(self, group_index: int, *, step: int | None = None) -> FoundGroup:
        """Return one group whole; without ``step`` it is looked for in all steps.

        Raises:
            RunDirectoryError: If no committed step has it, or files are missing or damaged.
        """
        records = self.steps() if step is None else [self.step(step)]
        for record in records:
            if found := self._group_in(record, group_index):
                return found
        where = "no step has" if step is None else f"step {step} has no"
        raise RunDirectoryError(f"{self.path}: {where} group {group_index}; `rollfeed show` lists the groups of a step")

    def _group_in(self, record: StepRecord, group_index: int) -> FoundGroup | None:
        step = record.step
        timings = read_timings(self.file(TIMINGS, step), group_index=group_index)
        for folder in (BATCHES, DROPPED) if timings else ():
            found = read_groups(self.file(folder, step), group_index=group_index, timings=timings)
            for group, reason in found:
                return FoundGroup(step=step, group=group, drop_reason=reason)
        return None
