"""Files of text: JSON lines, JSON arrays, and rows of cells with commas or tabs between them; also compressed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from rollfeed.errors import DataError
from rollfeed.prompts.files.raw_rows import RawRow, not_a_row, parse_json, unreadable

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""By the end of a file's name, as pyarrow calls them."""
_MAX_CELL_CHARACTERS = 1 << 30


class JsonFile:
    """JSON objects, one a line or in one array; fits :class:`RowFile`.

    Raises:
        DataError: If the file cannot be read, or holds something else.
    """

    columns: tuple[str, ...] | None = None

    def __init__(self, path: Path, *, kind: str) -> None:
        self.path = path
        content = _content(path)
        self._is_array = kind == ".json" and content.lstrip().startswith(b"[")
        self._values = _array(path, content) if self._is_array else _lines(path, content, kind)

    def __len__(self) -> int:
        return len(self._values)

    def read(self, rows: range) -> Iterator[RawRow]:
        for number in rows:
            line, value = self._values[number]
            where = f"{self.path}: row {number}" if self._is_array else f"{self.path}:{line}"
            yield RawRow(number, where, value)


def _array(path: Path, content: bytes) -> list[tuple[int, bytes | dict[str, Any] | ValueError]]:
    try:
        values = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return [(row, each if isinstance(each, dict) else ValueError(not_a_row(each))) for row, each in enumerate(values)]


def _lines(path: Path, content: bytes, kind: str) -> list[tuple[int, bytes | dict[str, Any] | ValueError]]:
    """Return the lines that are not blank, with their numbers from 1."""
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    first = lines[0][1].strip() if lines else b""
    if first.startswith(b"{") and kind == ".json" and len(lines) == 1:
        raise DataError(f"{path}: is one JSON object; make it an array of objects, or one object a line")
    remedy = "rename it to .json, or " if kind == ".jsonl" else ""
    if first in (b"{", b"[") and len(lines) > 2:
        remedy = remedy if first == b"[" else ""
        raise DataError(
            f"{path}: is JSON over several lines; {remedy}write one object a line, without commas between them"
        )
    if len(lines) == 1 and first.startswith(b"[") and first.endswith(b"]"):
        raise DataError(f"{path}: is one JSON array; {remedy}write one object a line, without commas between them")
    return list(lines)


class CellFile:
    """Rows of texts, whose first line names the columns; fits :class:`RowFile`.

    Every value is a text as it is written, and None where nothing is. The file is read twice and never held.

    Raises:
        DataError: If the file cannot be read, or its first line is no names.
    """

    def __init__(self, path: Path, *, kind: str) -> None:
        self.path = path
        self._separator = "\t" if kind == ".tsv" else ","
        csv.field_size_limit(max(csv.field_size_limit(), _MAX_CELL_CHARACTERS))
        try:
            with _opened(path) as file:
                begins = file.read(4)
        except OSError as error:
            raise unreadable(path, error) from error
        if problem := _form_problem(begins):
            raise DataError(f"{path}: {problem}")
        head = next(self._cells(), None)
        if head is None:
            raise DataError(f"{path}: is empty; give a file with at least one row")
        if isinstance(head[1], ValueError):
            raise DataError(f"{path}:1: {head[1]}")
        self.columns: tuple[str, ...] = tuple(name.strip() for name in head[1])
        if twice := sorted({name for name in self.columns if self.columns.count(name) > 1}):
            named = repr(twice[0]) if twice[0] else "no name"
            raise DataError(f"{path}: its first line, which names the columns, has {named} twice: rename one")
        self._num_rows = sum(1 for _ in self._cells()) - 1

    def __len__(self) -> int:
        return self._num_rows

    def read(self, rows: range) -> Iterator[RawRow]:
        for number, (line, cells) in enumerate(self._cells(), -1):
            if number >= rows.stop:
                return
            if number >= rows.start:
                yield RawRow(number, f"{self.path}:{line}", self._row(cells))

    def _row(self, cells: list[str] | ValueError) -> dict[str, str | None] | ValueError:
        if isinstance(cells, ValueError):
            return cells
        if len(cells) != len(self.columns):
            return ValueError(
                f"has {len(cells)} values, and the first line names {len(self.columns)} columns: put a text with "
                f"{'a tab' if self._separator == chr(9) else 'a comma'} in it in quotes"
            )
        return {name: cell or None for name, cell in zip(self.columns, cells, strict=True)}

    def _cells(self) -> Iterator[tuple[int, list[str] | ValueError]]:
        """Give the cells of each row that is not blank, with the line where it begins."""
        with (
            _opened(self.path) as file,
            io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text,
        ):
            reader, begins = csv.reader(text, delimiter=self._separator, strict=True), 1
            while True:
                cells: list[str] | ValueError
                try:
                    cells = next(reader)
                    if cells and not "".join(cells).isascii():
                        "".join(cells).encode()
                except StopIteration:
                    return
                except OSError as error:
                    raise unreadable(self.path, error) from error
                except UnicodeEncodeError:
                    cells = ValueError("is not UTF-8: save the whole file as UTF-8")
                except csv.Error as error:
                    cells = ValueError(f"cannot be split into values: {error}")
                if cells:
                    yield begins, cells
                begins = reader.line_num + 1


def _content(path: Path) -> bytes:
    """Return a text file whole. Raises DataError if it cannot be read, or its bytes are no UTF-8 text."""
    try:
        with _opened(path) as file:
            content = file.read()
    except OSError as error:
        raise unreadable(path, error) from error
    if problem := _form_problem(content[:8]):
        raise DataError(f"{path}: {problem}")
    return content.removeprefix(b"\xef\xbb\xbf")


def _opened(path: Path) -> BinaryIO:
    try:
        if (compression := COMPRESSIONS.get(path.suffix.lower())) is None:
            return path.open("rb")
        import pyarrow  # slow to import, and needed for some files only

        return cast(BinaryIO, pyarrow.input_stream(str(path), compression=compression))
    except OSError as error:
        raise unreadable(path, error) from error


def _form_problem(head: bytes) -> str | None:
    """Return why a file that begins so is no text."""
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04")):
        return "is compressed, which its name does not say: add .gz, .zst or .bz2 to it, or unpack it first"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head[:4]:
        return "is UTF-16 or UTF-32 text; save it as UTF-8"
    return None
