"""Rows of prompt files: JSONL and Parquet, whole or a slice."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.errors import DataError, suggestion
from rollfeed.types.text import well_formed_json

_BOUND = "(?:-?[0-9]{1,18})?"
_SLICE = re.compile(rf"(?P<path>.*)@\[(?P<start>{_BOUND}):(?P<stop>{_BOUND})\]", re.DOTALL)
_SUFFIXES = (".jsonl", ".parquet")
_REMEDIES = {
    ".json": ": where each line is an object, rename it to .jsonl",
    ".gz": ": unpack it first",
    ".zst": ": unpack it first",
    ".xz": ": unpack it first",
    ".bz2": ": unpack it first",
    ".zip": ": unpack it first",
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""What may be half of a pair, in a JSON line."""
_BATCH_BYTES = 32 * 1024**2
_FIRST_BATCH_ROWS, _MAX_BATCH_ROWS = 64, 8_192


class RawRow(NamedTuple):
    """One row as it lies in the file."""

    number: int
    """Counted from 0 over the whole file, whatever the slice; blank lines do not count."""
    where: str
    """File and line, for errors."""
    content: bytes | dict[str, Any] | ValueError
    """A JSON line, the columns of a Parquet row, or why they cannot be read."""

    def read(self) -> dict[str, Any]:
        """Return the row by column. Raises ValueError if it is none; says what is wrong."""
        if isinstance(self.content, bytes):
            return parse_json_row(self.content)
        if isinstance(self.content, ValueError):
            raise self.content
        return self.content


class PromptFile(NamedTuple):
    """The wanted rows of a file, read as they are asked for; what cannot be read then is a DataError."""

    path: Path
    columns: tuple[str, ...] | None
    """Of a Parquet file; None where every row has its own."""
    rows: Iterator[RawRow]


def open_prompt_file(path: str, *, columns: Collection[str] | None) -> PromptFile:
    """Open ``path`` or ``path@[start:stop]``; a file whose whole name is ``path`` comes first.

    Args:
        path: With slice bounds as in Python: negative ones count from the end, either may be left out.
        columns: Of a Parquet file only these are read; None for all.

    Raises:
        DataError: If the file is missing, not a file, unreadable, empty or of an unknown kind, or the slice selects
            nothing.
    """
    file, start, stop = _split_slice(path)
    _check_file(file)
    if file.suffix.lower() == ".jsonl":
        lines = _read_lines(file)
        chosen = _select(range(len(lines)), start, stop, file)
        rows = (RawRow(number, f"{file}:{lines[number][0]}", lines[number][1]) for number in chosen)
        return PromptFile(file, None, rows)
    return _open_parquet(file, start, stop, columns)


def parse_json_row(content: bytes) -> dict[str, Any]:
    """Parse one line. Raises ValueError if it is not a JSON object; says what is wrong."""
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
    return well_formed_json(record) if _SURROGATE.search(content) else record


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
    if path.suffix.lower() not in _SUFFIXES:
        remedy = _REMEDIES.get(path.suffix.lower(), "")
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use {' or '.join(_SUFFIXES)}{remedy}")


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
    if problem := _form_problem(content):
        raise DataError(f"{path}: {problem}")
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    first = found[0][1].strip() if found else b""
    if first in (b"{", b"[") and len(found) > 2:
        raise DataError(f"{path}: is JSON over several lines; write one object a line, without commas between them")
    if len(found) == 1 and first.startswith(b"[") and first.endswith(b"]"):
        raise DataError(f"{path}: is one JSON array; write one object a line, without commas between them")
    return found


def _form_problem(content: bytes) -> str | None:
    """Return why a file is no text that JSON can be read from."""
    if content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")):
        return "is compressed; unpack it first"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content[:4]:
        return "is UTF-16 or UTF-32 text; save it as UTF-8"
    return None


def _open_parquet(path: Path, start: int | None, stop: int | None, columns: Collection[str] | None) -> PromptFile:
    # Slow to import, and needed for Parquet only.
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path, buffer_size=_BATCH_BYTES)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    known = tuple(file.schema_arrow.names)
    chosen = _select(range(file.metadata.num_rows), start, stop, path)
    wanted = [name for name in known if columns is None or name in columns]
    records = _parquet_records(file, chosen, wanted, path)
    rows = (RawRow(number, f"{path}: row {number}", record) for number, record in zip(chosen, records, strict=True))
    return PromptFile(path, known, rows)


def _parquet_records(file: Any, chosen: range, columns: list[str], path: Path) -> Iterator[dict[str, Any] | ValueError]:
    import pyarrow

    first, reader = 0, _BatchReader(file, columns)
    try:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            for batch in reader.read(group, max(chosen.start - first, 0), min(chosen.stop - first, num_rows)):
                yield from _records_of(batch)
            first += num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


class _BatchReader:
    """Reads so few rows at a time that their size is bounded, and that pyarrow can join their texts."""

    def __init__(self, file: Any, columns: list[str]) -> None:
        self._file = file
        self._columns = columns
        self._num_rows = min(_FIRST_BATCH_ROWS, _MAX_BATCH_ROWS)
        self._may_grow = True

    def read(self, group: int, start: int, stop: int) -> Iterator[Any]:
        """Yield rows of a row group, from ``start`` to before ``stop``, in batches."""
        import pyarrow

        while start < stop:
            position = 0
            try:
                for batch in self._file.iter_batches(
                    batch_size=self._num_rows, row_groups=[group], columns=self._columns
                ):
                    begin, position = position, position + batch.num_rows
                    if position <= start:
                        continue
                    yield batch.slice(start - begin, min(stop, position) - start)
                    start = min(stop, position)
                    if start == stop or self._changes_after(batch):
                        break
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowCapacityError):  # more than 2 GiB of nested text
                if self._num_rows == 1:
                    raise
                self._num_rows, self._may_grow = max(1, self._num_rows // 8), False

    def _changes_after(self, batch: Any) -> bool:
        """Whether the next batches have another number of rows, because these rows are smaller or larger than thought.

        What a file says of its sizes is of no use: they are those of its encoding.
        """
        fitting = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
        grows = self._may_grow and fitting > self._num_rows
        if grows or fitting < self._num_rows // 8:
            self._num_rows, self._may_grow = fitting, False
            return True
        return False


def _records_of(batch: Any) -> Iterator[dict[str, Any] | ValueError]:
    try:
        records: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError) as error:
        if batch.num_rows > 1:
            for row in range(batch.num_rows):
                yield from _records_of(batch.slice(row, 1))
        else:
            yield ValueError(f"a value cannot be read: {error}")
        return
    for record in records:
        yield {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    """Return a value without what Parquet fills in: it gives every object the keys of all others, with null."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _select(rows: range, start: int | None, stop: int | None, path: Path) -> range:
    if not rows:
        raise DataError(f"{path}: is empty; give a file with at least one row")
    chosen = rows[start:stop]
    if not chosen:
        bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
        raise DataError(f"{path}: the slice [{bounds}] selects none of its {len(rows)} rows; choose other bounds")
    return chosen


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{path}: cannot be read: {error.strerror}; give a {path.suffix} file that can be")
    message = " ".join(str(error).split())[:300]
    return DataError(f"{path}: cannot be read ({message}): it is damaged, or no {path.suffix} file")
