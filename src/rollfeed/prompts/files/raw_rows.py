"""Rows as they lie in a file, before anything is asked of their columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rollfeed.errors import DataError, suggestion
from rollfeed.types.text import well_formed_json

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""What may be half of a pair, in JSON."""


class RawRow(NamedTuple):
    """One row as it lies in the file."""

    number: int
    """Counted from 0 over the whole file, whatever the slice; blank lines do not count."""
    where: str
    """File and line, for errors."""
    content: bytes | dict[str, Any] | ValueError
    """A JSON line, the columns of a row, or why they cannot be read."""

    def read(self) -> dict[str, Any]:
        """Return the row by column. Raises ValueError if it is none; says what is wrong."""
        if isinstance(self.content, bytes):
            value = parse_json(self.content)
            if not isinstance(value, dict):
                raise ValueError(not_a_row(value))
            return value
        if isinstance(self.content, ValueError):
            raise self.content
        return self.content


class RowFile(Protocol):
    """One file whose rows are read as they are asked for; what cannot be read then is a DataError."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Those of all rows; None where every row has its own."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def read(self, rows: range) -> Iterator[RawRow]:
        """Give the rows of these numbers, in order; ``rows`` has a step of 1."""
        ...


def parse_json(content: bytes) -> Any:
    """Parse JSON as files of rows have it. Raises ValueError if it is none; says what is wrong."""
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not JSON: {error.msg} at {line}column {error.colno}") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    return well_formed_json(value) if _SURROGATE.search(content) else value


def not_a_row(value: Any) -> str:
    """Return why a value is no row."""
    return f"must be a JSON object, is a {type(value).__name__}"


def missing_column(path: Path, key: str, value: str, columns: Sequence[str]) -> DataError:
    """Return the error for a setting ``key`` that names a column no row has."""
    known = f"the file has {', '.join(columns) or 'none'}"
    if set(path.suffixes) & {".csv", ".tsv"}:
        known = f"its first line, which names the columns, has {', '.join(columns)}"
    remedy = suggestion(value, columns, otherwise=f"set {key} to one of them")
    if len(columns) == 1 and (separators := [each for each in ";\t|" if each in columns[0]]):
        remedy = f"its columns are separated by {separators[0]!r}: save it with commas, or with tabs as .tsv"
    return DataError(f"{path}: {key} = {value!r}: no such column; {known}: {remedy}")


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{path}: cannot be read: {error.strerror}; give a {path.suffix} file that can be")
    message = " ".join(str(error).split())[:300]
    return DataError(f"{path}: cannot be read ({message}): it is damaged, or no {path.suffix} file")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
