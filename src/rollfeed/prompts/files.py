"""Rows of prompt files: JSONL and Parquet, whole or a slice."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.errors import DataError, suggestion

_BOUND = "(?:-?[0-9]{1,18})?"
_SLICE = re.compile(rf"(?P<path>.*)@\[(?P<start>{_BOUND}):(?P<stop>{_BOUND})\]", re.DOTALL)
_SUFFIXES = (".jsonl", ".parquet")


class RawRow(NamedTuple):
    """One row as it lies in the file."""

    number: int
    """Counted from 0 over the whole file, whatever the slice; blank lines do not count."""
    where: str
    """File and line, for errors."""
    content: bytes | dict[str, Any]
    """A JSON line, or the columns of a Parquet row."""


class PromptFile(NamedTuple):
    """The wanted rows of a file."""

    path: Path
    columns: tuple[str, ...] | None
    """Of a Parquet file; None where every row has its own."""
    rows: Iterator[RawRow]


def open_prompt_file(path: str, *, columns: Collection[str]) -> PromptFile:
    """Open ``path`` or ``path@[start:stop]``; a file whose whole name is ``path`` comes first.

    Args:
        path: With slice bounds as in Python: negative ones count from the end, either may be left out.
        columns: Of a Parquet file only these are read.

    Raises:
        DataError: If the file is missing, not a file, unreadable, empty or of an unknown kind, or the slice selects
            nothing.
    """
    file, start, stop = _split_slice(path)
    _check_file(file)
    if file.suffix == ".jsonl":
        lines = _read_lines(file)
        chosen = _select(range(len(lines)), start, stop, file)
        rows = (RawRow(number, f"{file}:{lines[number][0]}", lines[number][1]) for number in chosen)
        return PromptFile(file, None, rows)
    return _open_parquet(file, start, stop, columns)


def parse_json_row(content: bytes) -> dict[str, Any]:
    """Parse one line.

    Raises:
        ValueError: If it is not a JSON object; says what is wrong.
    """
    try:
        record = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, is a {type(record).__name__}")
    return record


def missing_column(path: Path, key: str, value: str, columns: Sequence[str]) -> DataError:
    """Return the error for a setting ``key`` that names a column no row has."""
    remedy = suggestion(value, columns, otherwise=f"set {key} to one of them")
    return DataError(
        f"{path}: {key} = {value!r}: no such column; the file has {', '.join(columns) or 'none'}: {remedy}"
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _split_slice(path: str) -> tuple[Path, int | None, int | None]:
    match = _SLICE.fullmatch(path)
    if match is None or _exists(Path(path)):
        return Path(path), None, None
    start, stop = (int(bound) if bound else None for bound in (match["start"], match["stop"]))
    return Path(match["path"]), start, stop


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)[:200]!r}: cannot be read ({error}): give the path of a prompt file") from error


def _check_file(path: Path) -> None:
    if not _exists(path):
        raise DataError(f"{path}: no such file; {_missing_file_remedy(path)}")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give the path of a {' or '.join(_SUFFIXES)} file in it")
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file; give the path of a {' or '.join(_SUFFIXES)} file")
    if path.suffix not in _SUFFIXES:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use {' or '.join(_SUFFIXES)}")


def _missing_file_remedy(path: Path) -> str:
    if "@[" in path.name:
        return "write a slice as file@[start:stop] with whole numbers, for example train.jsonl@[0:100]"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    siblings = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in _SUFFIXES)
    return suggestion(path.name, siblings, otherwise="check the path")


def _read_lines(path: Path) -> list[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers from 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _open_parquet(path: Path, start: int | None, stop: int | None, columns: Collection[str]) -> PromptFile:
    # Slow to import, and needed for Parquet only.
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        known = tuple(file.schema_arrow.names)
        chosen = _select(range(file.metadata.num_rows), start, stop, path)
        batches = file.iter_batches(columns=[name for name in known if name in columns])
        records = (record for batch in batches for record in batch.to_pylist())
        kept = list(islice(records, chosen.start, chosen.stop))
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    rows = (RawRow(number, f"{path}: row {number}", record) for number, record in zip(chosen, kept, strict=True))
    return PromptFile(path, known, rows)


def _select(rows: range, start: int | None, stop: int | None, path: Path) -> range:
    if not rows:
        raise DataError(f"{path}: is empty; give a file with at least one row")
    chosen = rows[start:stop]
    if not chosen:
        bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
        raise DataError(f"{path}: the slice [{bounds}] selects none of its {len(rows)} rows; choose other bounds")
    return chosen


def _unreadable(path: Path, error: Exception) -> DataError:
    message = " ".join(str(error).split())[:300]
    return DataError(f"{path}: cannot be read ({message}): check its permissions, and that it is a {path.suffix} file")
