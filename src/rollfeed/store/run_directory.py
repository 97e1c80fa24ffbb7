"""The directory a run writes to.

What is committed is what was delivered: a step's files, the run's next state among them, are written
whole and flushed to disk, then a row that vouches for them enters the journal in one transaction. A
process may be killed at any instant; the next :meth:`RunDirectory.open` removes what was not committed
and goes on from the last commit, or from an earlier one: then the rows of later steps go first, in one
transaction too, and their files after them.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from rollfeed.base.atomic import Digest, digest_of, replace_digested, replace_file, sync
from rollfeed.config import stored_identity
from rollfeed.config.resuming import refusal_of_changes
from rollfeed.errors import RunDirectoryError, RunFailedError
from rollfeed.protocols import Isolation
from rollfeed.store.journal import Journal, RunStatus, StepEntry, check_is_journal
from rollfeed.store.layout import (
    BATCHES,
    DROPPED,
    GROWING_FILES,
    ISOLATION,
    JOURNAL,
    METRICS,
    MODEL,
    SETTINGS,
    SPILL,
    STATES,
    STEP_FOLDERS,
    TIMINGS,
    TURNS,
    may_precede_journal,
    remove_training_files,
    remove_uncommitted,
    step_file,
)
from rollfeed.store.lock import RunLock, held_message, is_held
from rollfeed.store.spill import SpillFile
from rollfeed.store.states import StateFiles
from rollfeed.store.step_log import MetricsFile, StepLog, StepRecord, read_steps
from rollfeed.store.tables.parquet import batch_table, dropped_table, timings_table, write_table
from rollfeed.store.turns import TurnFile
from rollfeed.store.vouching import CheckedFiles, GrowingFiles, settings_text
from rollfeed.types import RunState, StepCommit
from rollfeed.types.text import step_range

logger = logging.getLogger(__name__)


class Rewind(Enum):
    """A place that a run can go back to, besides a step."""

    START = "start"
    """Before its first step: no step is kept, but what a trainer left is."""


BackTo = int | Rewind
"""The last step that is kept, or none."""


class RunDirectory:
    """A run directory that this process works on; made by :meth:`open`, a context manager.

    Leaving it without :meth:`finish` or :meth:`fail` leaves an unfinished run, to be resumed.
    """

    def __init__(
        self,
        path: Path,
        state: RunState | None,
        *,
        lock: RunLock,
        journal: Journal,
        states: StateFiles,
        step_log: StepLog,
        metrics: MetricsFile,
    ) -> None:
        self.path = path
        self.state = state
        """What this process goes on from; None where nothing was committed before."""
        self.spill = SpillFile(path / SPILL)
        """Where draws may wait that do not fit into memory; emptied at the end."""
        self.turns = TurnFile(path / TURNS, state)
        """What rollouts of several turns have done."""
        self._lock = lock
        self._journal = journal
        self._states = states
        self._step_log = step_log
        self._metrics = metrics
        self._growing = GrowingFiles(path)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        settings: Mapping[str, Any],
        identity: Mapping[str, Any],
        overwrite: bool,
        step: BackTo | None = None,
        folders: Sequence[Path] = (),
        chosen: Collection[str] = (),
    ) -> RunDirectory:
        """Start a run at ``path``, or go on with the one that is there.

        Args:
            path: Created with its parents where missing.
            settings: The resolved settings, JSON values; stored for the reader.
            identity: The settings that a run must share with the one it goes on with; JSON values.
            overwrite: Replace the run that is there, and what a trainer left with it. Only files that rollfeed
                wrote are removed.
            step: Go back to the state after this committed step, the last that is kept, or to the start; later ones
                are removed. A finished run is gone on with too then. By default nothing is removed.
            folders: Where data files and plug-ins are looked for; stored for the reader.
            chosen: Keys of settings that are as they are on purpose; see :mod:`rollfeed.config.resuming`.

        Raises:
            RunDirectoryError: If the directory cannot be written, is worked on by another process, or
                holds something else: other files, a finished run, one with another identity, one
                without that step, or one with files that are not as they were written. Nothing has been changed then.
        """
        if problem := cls.problem(path, identity=identity, overwrite=overwrite, step=step, chosen=chosen):
            raise RunDirectoryError(problem)
        try:
            path.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo:
                lock = RunLock(path)
                undo.callback(lock.release)
                # Once more, now that nobody else can change it.
                if problem := _contents_problem(path, identity, overwrite, step, chosen):
                    raise RunDirectoryError(problem)
                if overwrite or not (path / JOURNAL).exists():
                    # First, or they would seem to belong to the new journal.
                    remove_training_files(path)
                    Journal.create(path / JOURNAL, settings=settings, identity=identity)
                journal = Journal(path / JOURNAL, read_only=False)
                undo.callback(journal.close)
                kept = kept_steps(journal.steps(), step)
                # All is read before anything is changed.
                check_kept(path, journal, kept)
                records = read_steps(path, journal)[: len(kept)]
                states = StateFiles(path)
                state = states.read(kept[-1]) if kept else None
                _start(journal, kept, settings=settings, folders=folders)
                step_log, metrics = _restore_files(path, kept, records, settings, undo)
                made = cls(path, state, lock=lock, journal=journal, states=states, step_log=step_log, metrics=metrics)
                undo.pop_all()
                return made
        except (OSError, sqlite3.Error) as error:
            raise RunDirectoryError(
                f"{path}: cannot be written: {_reason(error)}; choose another --out, or make it writable"
            ) from error

    @staticmethod
    def problem(
        path: Path,
        *,
        identity: Mapping[str, Any],
        overwrite: bool,
        step: BackTo | None = None,
        chosen: Collection[str] = (),
    ) -> str | None:
        """Return the line with which :meth:`open` would refuse, or None; nothing is created or changed.

        What only trying can tell (a full disk, a race, a damaged state) is not found.
        """
        existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
        if not existing.is_dir():
            return f"{path}: {existing} is not a directory; choose another --out"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{path}: {existing} is not writable; choose another --out"
        if existing != path:
            return None if step is None else f"{path}: does not exist; give the directory that `rollfeed run` wrote"
        if is_held(path):
            return held_message(path)
        return _contents_problem(path, identity, overwrite, step, chosen)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def steps(self) -> tuple[StepRecord, ...]:
        """Return the committed steps, those of earlier processes included."""
        return read_steps(self.path, self._journal)

    def commit(self, commit: StepCommit, *, reward_key: str | None) -> None:
        """Store a step and the state it leaves.

        Blocks for the disk: call it in a thread, one commit at a time. When it returns, the step
        survives a power cut; when it raises, the step is in the run whole or not at all.

        Raises:
            RunFailedError: If the disk refuses, or a label, metadata or message is not JSON.
        """
        batch = commit.batch
        record = StepRecord(
            step=batch.step,
            policy_version=batch.policy_version,
            num_groups=len(batch.groups),
            num_samples=len(batch.samples),
            num_dropped=len(commit.dropped),
            response_tokens=sum(group.response_tokens for group in batch.groups),
            metrics={name: float(value) for name, value in batch.metrics.items()},
            drop_reasons=Counter(dropped.reason for dropped in commit.dropped),
            wasted_tokens=commit.wasted_tokens,
            ledger=commit.state.ledger,
        )
        with self._explained(f"step {batch.step} cannot be stored"):
            files = self._write_step_files(commit, reward_key)
            files[STATES], state_checksum = self._states.write(batch.step, commit.state)
            record_end, record_checksum = self._step_log.append(record)
            entry = StepEntry(
                step=batch.step,
                record_end=record_end,
                record_checksum=record_checksum,
                state_size=files[STATES].size,
                state_checksum=state_checksum,
            )
            self._journal.commit(entry, {**files, **self._growing.digests()})
            self._step_log.committed(entry)
            self.turns.committed(batch.step + 1)
            self._metrics.log(record.metrics, step=batch.step)

    def record_isolation(self, isolation: Isolation) -> None:
        """Store at which isolation level programs of the policy run. Raises RunFailedError if the disk refuses."""
        with self._explained("the isolation level cannot be stored"):
            text = settings_text(asdict(isolation))
            self._journal.vouch(ISOLATION, replace_digested(self.path / ISOLATION, lambda file: file.write(text)))

    def finish(self, cause: str | None = None) -> None:
        """Say that the run has come to its end, and why if that is an early one; it will not be resumed."""
        with self._explained("the end of the run cannot be stored"):
            model = sorted((self.path / MODEL).rglob("*"))
            digests = {str(each.relative_to(self.path)): digest_of(each) for each in model if each.is_file()}
            self._journal.end(RunStatus.FINISHED, cause=cause, files={**digests, **self._growing.digests()})

    def fail(self, cause: str) -> None:
        """Say why the run stopped; it can be resumed."""
        with self._explained("the end of the run cannot be stored"):
            self._journal.end(RunStatus.FAILED, cause=cause, files=self._growing.digests())

    def close(self) -> None:
        """Close the files and let other processes work on the run; may be called twice."""
        self.spill.close()
        self.turns.close()
        self._metrics.close()
        self._step_log.close()
        self._journal.close()
        self._lock.release()

    def _write_step_files(self, commit: StepCommit, reward_key: str | None) -> dict[str, Digest]:
        batch, step = commit.batch, commit.batch.step
        tables = {
            BATCHES: batch_table(batch, reward_key=reward_key),
            TIMINGS: timings_table([*batch.groups, *(dropped.group for dropped in commit.dropped)]),
        }
        if commit.dropped:
            tables[DROPPED] = dropped_table(
                commit.dropped, step=step, policy_version=batch.policy_version, reward_key=reward_key
            )
        return {
            folder: replace_digested(step_file(self.path, folder, step), partial(write_table, table))
            for folder, table in tables.items()
        }

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise RunFailedError(
                f"{self.path}: {what}: {_reason(error)}; committed steps stay readable, the same command resumes"
            ) from error


def _start(
    journal: Journal, kept: Sequence[StepEntry], *, settings: Mapping[str, Any], folders: Sequence[Path]
) -> None:
    next_step = kept[-1].step + 1 if kept else 0
    if len(kept) < len(journal.steps()):  # what was done in turns goes back with the run
        (journal.path.parent / TURNS).unlink(missing_ok=True)
    for change in journal.start(settings=settings, folders=[str(folder) for folder in folders], next_step=next_step):
        logger.info("%s: %s", journal.path.parent, change)


def check_kept(path: Path, journal: Journal, kept: Sequence[StepEntry]) -> None:
    """Refuse to go on behind steps with files that are not as they were written.

    Raises:
        RunDirectoryError: If one is missing or damaged; says which, and what to do.
    """
    files, vouched = CheckedFiles(path, journal.vouched), journal.vouched()
    for entry in kept:
        for name in vouched.steps.get(entry.step, {}):
            if name in STEP_FOLDERS:
                files.of_step(name, entry.step)
    for name in GROWING_FILES if kept else ():
        files.growing(name, up_to=kept[-1].step)


def kept_steps(entries: Sequence[StepEntry], step: BackTo | None) -> list[StepEntry]:
    """Return the steps that stay when a run goes back to one, or to its start; all of them by default."""
    if isinstance(step, Rewind):
        return []
    return [entry for entry in entries if step is None or entry.step <= step]


def _restore_files(
    path: Path,
    committed: Sequence[StepEntry],
    records: Sequence[StepRecord],
    settings: Mapping[str, Any],
    undo: ExitStack,
) -> tuple[StepLog, MetricsFile]:
    for folder in STEP_FOLDERS:
        (path / folder).mkdir(exist_ok=True)
    if not committed:  # of the run that was here before
        (path / ISOLATION).unlink(missing_ok=True)
    step_log = StepLog(path, committed)
    undo.callback(step_log.close)
    sync(path)
    remove_uncommitted(path, frozenset(entry.step for entry in committed))
    replace_file(path / SETTINGS, lambda file: file.write(settings_text(dict(settings))))
    metrics = MetricsFile(path / METRICS, committed=records)
    undo.callback(metrics.close)
    return step_log, metrics


def _contents_problem(
    path: Path, identity: Mapping[str, Any], overwrite: bool, step: BackTo | None, chosen: Collection[str]
) -> str | None:
    """Return why what is in an existing, writable directory cannot become this run."""
    if step is not None and overwrite:
        return f"{path}: cannot both be replaced and go back to step {step}; leave out --overwrite or --step"
    if not (path / JOURNAL).exists():
        if step is not None:
            return f"{path}: holds no run, and so no step {step}; give the directory that `rollfeed run` wrote"
        foreign = sorted(name for name in os.listdir(path) if not may_precede_journal(name))
        return f"{path}: holds {foreign[0]} but no run; choose another --out, or an empty one" if foreign else None
    try:
        if overwrite:
            check_is_journal(path / JOURNAL)
            return None
        journal = Journal(path / JOURNAL, read_only=True)
        try:
            run, entries = journal.run(), journal.steps()
        finally:
            journal.close()
    except RunDirectoryError as error:
        return str(error)
    is_finished = run.status is RunStatus.FINISHED
    if is_finished and step is None:
        return (
            f"{path}: holds a finished run{f' ({run.cause})' if run.cause else ''}; choose another --out, or replace "
            f"it with --overwrite, or go on after one of its steps with --resume {path} --step N"
        )
    # As this version reads the settings, if it can: it knows more of them than the version that stored the identity.
    stored = stored_identity(run.settings) or run.identity
    if refusal := refusal_of_changes(_flat(stored), _flat(identity), chosen=chosen):
        return f"{path}: holds {'a finished' if is_finished else 'an unfinished'} run with other settings: {refusal}"
    return step_problem(path, entries, step)


def step_problem(path: Path, entries: Sequence[StepEntry], step: BackTo | None) -> str | None:
    """Return why a run cannot go back to a step; None if it can."""
    if step is None or isinstance(step, Rewind) or any(entry.step == step for entry in entries):
        return None
    have = f"it has {step_range(entries[0].step, entries[-1].step)}" if entries else "no step is committed yet"
    return f"{path}: has no step {step} to go back to; {have}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return leaves by dotted name, as JSON, so that a tuple and the list it was stored as are equal."""
    leaves: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return leaves


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
