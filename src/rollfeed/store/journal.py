"""What a run has committed, in one sqlite file.

A step exists when its row is here. The row, the state that the next step starts from and the
run's status change in one transaction, flushed to disk before it counts.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollfeed.errors import RunDirectoryError
from rollfeed.store.atomic import sync_folder
from rollfeed.store.codec import decode_state
from rollfeed.store.json_text import metrics_json, to_json
from rollfeed.types import LedgerCounts, RunState

APPLICATION_ID = 0x726F6C66
"""Stands in the file's header and says whose it is: "rolf"."""
FORMAT_VERSION = 1
"""Raised when the tables change; other versions are refused."""

_HEADER_BYTES = 100
_SCHEMA = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    settings TEXT NOT NULL,
    identity TEXT NOT NULL,
    status TEXT NOT NULL,
    cause TEXT
);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    num_groups INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    num_dropped INTEGER NOT NULL,
    response_tokens INTEGER NOT NULL,
    metrics TEXT NOT NULL,
    drop_reasons TEXT NOT NULL,
    wasted_tokens TEXT NOT NULL,
    ledger TEXT NOT NULL
);
CREATE TABLE states (step INTEGER PRIMARY KEY, state BLOB NOT NULL);
"""


class RunStatus(StrEnum):
    """How far a run has come."""

    RUNNING = "running"
    """Not ended yet; whether a process works on it, the lock says."""
    FINISHED = "finished"
    FAILED = "failed"
    """It can be resumed all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the journal says of the run as a whole."""

    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    """The settings that a resumed run must share."""
    status: RunStatus
    cause: str | None
    """Why it failed, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What the journal says of one committed step."""

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


class Journal:
    """One run's journal, open for reading or writing.

    Raises:
        RunDirectoryError: If the file is not a journal of this version, or cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        check_is_journal(path)
        self._path = path
        with self._explained():
            self._connection = _read_only(path) if read_only else _writable(path)
            try:
                self._check_version()
            except BaseException:
                self._connection.close()
                raise

    @classmethod
    def create(cls, path: Path, *, settings: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Put a new journal at ``path``, in place of one that is there."""
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
            row = (to_json(dict(settings), "settings"), to_json(dict(identity), "identity"), RunStatus.RUNNING.value)
            connection.execute("INSERT INTO run VALUES (1, ?, ?, ?, NULL)", row)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        temporary.replace(path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def run(self) -> RunRecord:
        """Return the run's row."""
        with self._explained():
            settings, identity, status, cause = self._connection.execute(
                "SELECT settings, identity, status, cause FROM run"
            ).fetchone()
            return RunRecord(
                settings=json.loads(settings), identity=json.loads(identity), status=RunStatus(status), cause=cause
            )

    def steps(self) -> tuple[StepRecord, ...]:
        """Return the committed steps, in order."""
        columns = ", ".join(StepRecord.__dataclass_fields__)
        with self._explained():
            rows = self._connection.execute(f"SELECT {columns} FROM steps ORDER BY step").fetchall()
            return tuple(_step_record(dict(zip(StepRecord.__dataclass_fields__, row, strict=True))) for row in rows)

    def state(self) -> RunState | None:
        """Return the state of the last commit; None before the first."""
        with self._explained():
            row = self._connection.execute("SELECT state FROM states ORDER BY step DESC LIMIT 1").fetchone()
        return None if row is None else decode_state(row[0])

    def start(self, *, settings: Mapping[str, Any]) -> None:
        """Say that a process works on the run, with these settings."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE run SET settings = ?, status = ?, cause = NULL",
                (to_json(dict(settings), "settings"), RunStatus.RUNNING.value),
            )

    def end(self, status: RunStatus, *, cause: str | None = None) -> None:
        """Say how the run ended."""
        with self._transaction() as connection:
            connection.execute("UPDATE run SET status = ?, cause = ?", (status.value, cause))

    def commit(self, record: StepRecord, state: bytes) -> None:
        """Add a step and replace the state, or do neither."""
        values: dict[str, Any] = {name: getattr(record, name) for name in StepRecord.__dataclass_fields__}
        values["metrics"] = metrics_json(record.metrics)
        values["drop_reasons"] = to_json(dict(record.drop_reasons), "drop reasons")
        values["wasted_tokens"] = to_json(dict(record.wasted_tokens), "wasted tokens")
        values["ledger"] = to_json(ledger_dict(record.ledger), "ledger")
        names, places = ", ".join(values), ", ".join("?" * len(values))
        with self._transaction() as connection:
            connection.execute(f"INSERT INTO steps ({names}) VALUES ({places})", tuple(values.values()))
            # Only the newest state is kept, so that the file does not grow with the run.
            connection.execute("DELETE FROM states")
            connection.execute("INSERT INTO states VALUES (?, ?)", (record.step, state))

    def _check_version(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version != FORMAT_VERSION:
            raise RunDirectoryError(
                f"{self._path}: has version {version}, this rollfeed reads {FORMAT_VERSION}: "
                "use the rollfeed that wrote it, or another --out"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
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
                f"{self._path}: cannot be opened: {error}; it may be locked by another program, or stand on a "
                "read-only disk (then copy the run directory to a writable one)"
            ) from error
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            if isinstance(error, RunDirectoryError):
                raise
            raise RunDirectoryError(
                f"{self._path}: is damaged: {error}; restore the run directory from a copy"
            ) from error


def check_is_journal(path: Path) -> None:
    """Refuse a file that another program wrote.

    Raises:
        RunDirectoryError: If the file does not say that it is a journal of rollfeed.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror}") from error
    # sqlite's file format: the magic string at 0, the application id, big-endian, at 68.
    if not header.startswith(b"SQLite format 3\0") or header[68:72] != APPLICATION_ID.to_bytes(4, "big"):
        raise RunDirectoryError(f"{path}: is not a journal of rollfeed; choose another directory, or remove the file")


def ledger_dict(ledger: LedgerCounts) -> dict[str, int]:
    """Return the counts by name."""
    return {name: getattr(ledger, name) for name in LedgerCounts.__dataclass_fields__}


def _step_record(row: dict[str, Any]) -> StepRecord:
    for name in ("metrics", "drop_reasons", "wasted_tokens", "ledger"):
        row[name] = json.loads(row[name])
    row["metrics"] = {name: math.nan if value is None else value for name, value in row["metrics"].items()}
    row["ledger"] = LedgerCounts(**row["ledger"])
    return StepRecord(**row)


def _writable(path: Path) -> sqlite3.Connection:
    # Commits are made from worker threads, one at a time; sqlite's own check would forbid that.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _read_only(path: Path) -> sqlite3.Connection:
    # Without a -wal file nobody writes and nothing is pending. "immutable" then reads without leaving files
    # beside the journal, and works on a read-only disk.
    mode = "mode=ro" if os.path.exists(f"{path}-wal") else "mode=ro&immutable=1"
    return sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, isolation_level=None, timeout=1.0)
