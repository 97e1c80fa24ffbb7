"""Rows of the journal as they are read and written with their seals; transactions are the caller's."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from typing import Any

from rollfeed.base.atomic import Digest
from rollfeed.store.vouching.seals import OF_RUN, Rows, chained, files_of, files_text, seal_of_run

LATER_TABLES = (
    "CREATE TABLE IF NOT EXISTS changes "
    "(step INTEGER NOT NULL, key TEXT NOT NULL, old TEXT NOT NULL, new TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS vouched (step INTEGER PRIMARY KEY, files TEXT NOT NULL, seal BLOB NOT NULL)",
)
"""Made where a run is gone on with, too, since journals of before have no such tables."""
_RUN, _CHANGE = "settings, identity, status, cause, folders", "step, key, old, new"
_STEP = "step, record_end, record_checksum, state_size, state_checksum"


def read_rows(connection: sqlite3.Connection) -> Rows:
    """Return all rows of a journal, of earlier versions too, in one transaction of the caller's.

    Raises:
        ValueError: If there is no row of the run.
        sqlite3.Error: If the tables cannot be read.
    """

    def select(columns: str, table: str, order: str) -> list[Any]:
        return connection.execute(f"SELECT {columns} FROM {table} ORDER BY {order}").fetchall()

    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    run = connection.execute(f"SELECT {_RUN} FROM run").fetchone()
    if run is None:
        raise ValueError("the row of the run is gone")
    return Rows(
        run=run,
        steps=select(_STEP, "steps", "step"),
        changes=select(_CHANGE, "changes", "step, key") if "changes" in tables else [],
        vouched=select("step, files, seal", "vouched", "step") if "vouched" in tables else None,
    )


def forget_steps(connection: sqlite3.Connection, next_step: int, kept_files: Collection[str]) -> None:
    """Delete a step and those behind it, and vouch for no files of the run but some; seal what has no seal yet."""
    for table in ("steps", "vouched"):
        connection.execute(f"DELETE FROM {table} WHERE step >= ?", (next_step,))
    rows = read_rows(connection)
    sealed = {row[0] for row in rows.vouched or ()}
    for row in rows.steps:
        if row[0] not in sealed:  # of an earlier version, which had no digests
            seal_step(connection, row, {})
    of_run = _files_of_run(connection)
    connection.execute("DELETE FROM vouched WHERE step = ?", (OF_RUN,))
    seal_run(connection, {name: digest for name, digest in of_run.items() if name in kept_files})


def seal_step(connection: sqlite3.Connection, row: tuple[int, ...], files: Mapping[str, Digest]) -> None:
    """Seal a step's row, the last one, with the digests of its files."""
    text = files_text(files)
    seal = chained(_last_seal(connection), tuple(row), text)
    connection.execute("INSERT INTO vouched VALUES (?, ?, ?)", (row[0], text, seal))


def seal_run(connection: sqlite3.Connection, files: Mapping[str, Digest]) -> None:
    """Seal the run's row as it is now, with these files and those that it vouches for already."""
    text = files_text({**_files_of_run(connection), **files})
    run = connection.execute(f"SELECT {_RUN} FROM run").fetchone()
    changes = connection.execute(f"SELECT {_CHANGE} FROM changes ORDER BY step, key").fetchall()
    seal = seal_of_run(run, changes, text, _last_seal(connection))
    connection.execute("INSERT OR REPLACE INTO vouched VALUES (?, ?, ?)", (OF_RUN, text, seal))


def _files_of_run(connection: sqlite3.Connection) -> dict[str, Digest]:
    row = connection.execute("SELECT files FROM vouched WHERE step = ?", (OF_RUN,)).fetchone()
    return {} if row is None else files_of(row[0])


def _last_seal(connection: sqlite3.Connection) -> bytes:
    query = "SELECT seal FROM vouched WHERE step > ? ORDER BY step DESC LIMIT 1"
    row: tuple[bytes] | None = connection.execute(query, (OF_RUN,)).fetchone()
    return b"" if row is None else row[0]
