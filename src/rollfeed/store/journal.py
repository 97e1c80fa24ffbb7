"""The journal of a run: its commits, in one sqlite file.

A step exists when its row is here. The row stands for all that the step left: it has the checksums of
its account and of the state that the next step starts from, and the digests of its files, which are on disk
before it. Rows come and go in one transaction, flushed to disk before it counts; a step takes some 500 bytes
however large it is. Each row has a seal, which is checked when it is read (:mod:`rollfeed.store.vouching`).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.base.atomic import Digest, open_regular, sync, temporary_path
from rollfeed.config import stored_values
from rollfeed.errors import RunDirectoryError
from rollfeed.store.layout import ISOLATION
from rollfeed.store.vouching import Rows, Vouched, vouched_by
from rollfeed.store.vouching.sealed_rows import LATER_TABLES, forget_steps, read_rows, seal_run, seal_step
from rollfeed.types.text import well_formed

APPLICATION_ID = 0x726F6C66
"""Stands in the file's header and says whose it is: "rolf"."""
FORMAT_VERSION = 3
"""Raised when the tables change."""
_WITHOUT_SEALS = 2
"""The version before, which is read, and becomes this one when its run is gone on with."""

_HEADER_BYTES = 100
_CHECKPOINT_PAGES = 64  # what waits in the -wal file at most; sqlite's own 1,000 would be most of the journal
_SCHEMA = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    settings TEXT NOT NULL,
    identity TEXT NOT NULL,
    status TEXT NOT NULL,
    cause TEXT,
    folders TEXT NOT NULL
);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    record_end INTEGER NOT NULL,
    record_checksum INTEGER NOT NULL,
    state_size INTEGER NOT NULL,
    state_checksum INTEGER NOT NULL
);
"""


class RunStatus(StrEnum):
    """The state that a run is in."""

    RUNNING = "running"
    """Not ended yet; whether a process works on it, the lock says."""
    FINISHED = "finished"
    FAILED = "failed"
    """It can be resumed all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The journal's record of the run as a whole."""

    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    """The settings that a resumed run must share."""
    status: RunStatus
    cause: str | None
    """Why it failed, or has fewer steps than were asked for, if so."""
    folders: tuple[str, ...]
    """Where its data files and plug-in modules are looked for."""


class StepEntry(NamedTuple):
    """The journal's record of one committed step."""

    step: int
    record_end: int
    """Where its line in steps.jsonl ends, in bytes."""
    record_checksum: int
    state_size: int
    """Of its state file, in bytes."""
    state_checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting that is another since a step, because the run was gone on with so."""

    step: int
    """The first one that it is true of."""
    key: str
    old: Any
    new: Any
    """Both JSON values."""

    def __str__(self) -> str:
        old, new = (json.dumps(value, ensure_ascii=False) for value in (self.old, self.new))
        return f"from step {self.step}: {self.key} = {new}, {old} before"


class Journal:
    """One run's journal, open for reading or writing.

    Raises:
        RunDirectoryError: If the file is not a journal of this version, or cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        check_is_journal(path)
        self.path = path
        with self._explained():
            self._connection = _read_only(path) if read_only else _writable(path)
            self._seen: tuple[int, Rows, Vouched] | None = None
            try:
                self._check_version()
                self._look()
            except BaseException:
                self._connection.close()
                raise

    @classmethod
    def create(cls, path: Path, *, settings: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Put a new journal at ``path``, in place of one that is there."""
        temporary = temporary_path(path)
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            _make_this_version(connection)
            row = (json.dumps(dict(settings)), json.dumps(dict(identity)), RunStatus.RUNNING.value)
            connection.execute("INSERT INTO run VALUES (1, ?, ?, ?, NULL, '[]')", row)
            seal_run(connection, {})
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        temporary.replace(path)
        sync(path.parent)

    def close(self) -> None:
        self._connection.close()

    def run(self) -> RunRecord:
        """Return the run's row."""
        with self._explained():
            settings, identity, status, cause, folders = self._look()[0].run
            return RunRecord(
                settings=json.loads(settings),
                identity=json.loads(identity),
                status=RunStatus(status),
                cause=cause,
                folders=tuple(json.loads(folders)),
            )

    def steps(self) -> tuple[StepEntry, ...]:
        """Return the committed steps, in order."""
        with self._explained():
            return tuple(map(StepEntry._make, self._look()[0].steps))

    def changes(self) -> tuple[SettingChange, ...]:
        """Return what has been changed in the settings since the run began, in the order of steps."""
        with self._explained():
            return tuple(
                SettingChange(step=step, key=key, old=json.loads(old), new=json.loads(new))
                for step, key, old, new in self._look()[0].changes
            )

    def vouched(self) -> Vouched:
        """Return the digests of the files that the journal vouches for."""
        with self._explained():
            return self._look()[1]

    def start(
        self, *, settings: Mapping[str, Any], folders: Sequence[str], next_step: int
    ) -> tuple[SettingChange, ...]:
        """Say that a process works on the run, with these settings; return which of them are new to it.

        ``next_step`` is the step that it makes first: that one and those behind it are forgotten.
        """
        earlier = self.changes()
        new = _new_changes(self.run().settings, settings, earlier, step=next_step)
        kept = [change for change in earlier if change.step < next_step]
        rows = [(each.step, each.key, json.dumps(each.old), json.dumps(each.new)) for each in (*kept, *new)]
        with self._transaction() as connection:
            _make_this_version(connection)
            connection.execute(
                "UPDATE run SET settings = ?, status = ?, cause = NULL, folders = ?",
                (json.dumps(dict(settings)), RunStatus.RUNNING.value, json.dumps(list(folders))),
            )
            connection.execute("DELETE FROM changes")
            connection.executemany("INSERT INTO changes VALUES (?, ?, ?, ?)", rows)
            kept_files = {ISOLATION} if next_step > 0 else set()
            forget_steps(connection, next_step, kept_files)
        return new

    def forget(self, next_step: int, *, cause: str) -> None:
        """Forget a step and those behind it, of a run that can be gone on with then; nothing else is new."""
        with self._transaction() as connection:
            _make_this_version(connection)
            connection.execute("UPDATE run SET status = ?, cause = ?", (RunStatus.FAILED.value, well_formed(cause)))
            forget_steps(connection, next_step, {ISOLATION})

    def end(self, status: RunStatus, *, cause: str | None = None, files: Mapping[str, Digest] | None = None) -> None:
        """Say how the run ended, and vouch for files that belong to no step as they are by then."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE run SET status = ?, cause = ?", (status.value, None if cause is None else well_formed(cause))
            )
            seal_run(connection, files or {})

    def commit(self, entry: StepEntry, files: Mapping[str, Digest]) -> None:
        """Add a step, and vouch for its files: by folder, and by name those that grow."""
        with self._transaction() as connection:
            connection.execute(f"INSERT INTO steps VALUES ({', '.join('?' * len(entry))})", entry)
            seal_step(connection, entry, files)
            seal_run(connection, {})

    def vouch(self, name: str, digest: Digest) -> None:
        """Vouch for a file that belongs to no step."""
        with self._transaction() as connection:
            seal_run(connection, {name: digest})

    def _look(self) -> tuple[Rows, Vouched]:
        """Return all rows and the digests in them; read and checked once, until something is written."""
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()  # by others; see _transaction
        if self._seen is not None and self._seen[0] == version:
            return self._seen[1:]
        self._connection.execute("BEGIN")
        try:
            rows = read_rows(self._connection)
            (stored,) = self._connection.execute("PRAGMA user_version").fetchone()
        finally:
            self._connection.execute("ROLLBACK")
        if (rows.vouched is None) != (stored == _WITHOUT_SEALS):
            raise ValueError(f"it is of version {stored}, and its tables are of another")
        self._seen = (version, rows, vouched_by(rows))
        return self._seen[1:]

    def _check_version(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (_WITHOUT_SEALS, FORMAT_VERSION):
            raise RunDirectoryError(
                f"{self.path}: has version {version}, this rollfeed reads {FORMAT_VERSION}: "
                "use the rollfeed that wrote it, or another --out"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
            self._seen = None
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what sqlite says of a file that cannot be read into one line."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise RunDirectoryError(
                f"{self.path}: cannot be opened: {error}; it may be locked by another program, or stand on a "
                "read-only disk (then copy the run directory to a writable one)"
            ) from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            if isinstance(error, RunDirectoryError):
                raise
            raise RunDirectoryError(
                f"{self.path}: is damaged: {error}; restore the run directory from a copy"
            ) from error


def _make_this_version(connection: sqlite3.Connection) -> None:
    for table in LATER_TABLES:
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")


def _new_changes(
    stored: Mapping[str, Any], given: Mapping[str, Any], earlier: Sequence[SettingChange], *, step: int
) -> tuple[SettingChange, ...]:
    """Return which settings are others from a step on than in the one before it; none in the first."""
    before, now = stored_values(stored), stored_values(given)
    for change in reversed(earlier):
        if change.step >= step:  # what was made with it is made again
            before[change.key] = change.old
    return tuple(
        SettingChange(step=step, key=key, old=before.get(key), new=now.get(key))
        for key in sorted(before.keys() | now.keys())
        if step > 0 and before.get(key) != now.get(key)
    )


def check_is_journal(path: Path) -> None:
    """Refuse a file that another program wrote.

    Raises:
        RunDirectoryError: If the file does not say that it is a journal of rollfeed.
    """
    try:
        with open_regular(path) as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error
    # sqlite's file format: the magic string at 0, the application id, big-endian, at 68.
    if not header.startswith(b"SQLite format 3\0") or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
        raise RunDirectoryError(f"{path}: is not a journal of rollfeed; choose another directory, or remove the file")


def _writable(path: Path) -> sqlite3.Connection:
    # Commits are made from worker threads, one at a time; sqlite's own check would forbid that.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    return connection


def _read_only(path: Path) -> sqlite3.Connection:
    # Without a -wal file nobody writes and nothing is pending. "immutable" then reads without leaving files
    # beside the journal, and works on a read-only disk.
    mode = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"
    uri = f"{path.resolve().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=1.0, check_same_thread=False)
