"""Files of columns: Parquet, and Arrow as `datasets` saves it; read a batch at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rollfeed.prompts.files.raw_rows import RawRow, unreadable

_BATCH_BYTES = 32 * 1024**2
_FIRST_BATCH_ROWS, _MAX_BATCH_ROWS = 64, 8_192


class ParquetFile:
    """A Parquet file; fits :class:`RowFile`.

    Only ``wanted`` columns are read; None for all.

    Raises:
        DataError: If it cannot be read.
    """

    def __init__(self, path: Path, *, wanted: Collection[str] | None) -> None:
        # Slow to import, and needed for such files only.
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path, buffer_size=_BATCH_BYTES)
        except (OSError, pyarrow.ArrowException) as error:
            raise unreadable(path, error) from error
        self.columns: tuple[str, ...] = tuple(self._file.schema_arrow.names)
        self._wanted = [name for name in self.columns if wanted is None or name in wanted]

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def read(self, rows: range) -> Iterator[RawRow]:
        records = _parquet_records(self._file, rows, self._wanted, self.path)
        for number, record in zip(rows, records, strict=True):
            yield RawRow(number, f"{self.path}: row {number}", record)


class ArrowFile:
    """An Arrow file, of the streaming form or the other; fits :class:`RowFile`. It is mapped, and never held.

    Only ``wanted`` columns are read; None for all.

    Raises:
        DataError: If it cannot be read.
    """

    def __init__(self, path: Path, *, wanted: Collection[str] | None) -> None:
        self.path = path
        self.columns: tuple[str, ...] = ()
        self._num_rows = 0
        for batch in self._batches():
            self.columns, self._num_rows = tuple(batch.schema.names), self._num_rows + batch.num_rows
        self._wanted = [name for name in self.columns if wanted is None or name in wanted]

    def __len__(self) -> int:
        return self._num_rows

    def read(self, rows: range) -> Iterator[RawRow]:
        first = 0
        for batch in self._batches():
            part = batch.select(self._wanted)
            for start in range(max(rows.start - first, 0), min(rows.stop - first, batch.num_rows), _FIRST_BATCH_ROWS):
                stop = min(start + _FIRST_BATCH_ROWS, rows.stop - first, batch.num_rows)
                for number, record in enumerate(_records_of(part.slice(start, stop - start)), first + start):
                    yield RawRow(number, f"{self.path}: row {number}", record)
            first += batch.num_rows

    def _batches(self) -> Iterator[Any]:
        import pyarrow
        from pyarrow import ipc

        try:
            with pyarrow.memory_map(str(self.path)) as file:
                if file.read(6) != b"ARROW1":
                    file.seek(0)
                    yield from ipc.open_stream(file)
                    return
                reader = ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
        except (OSError, pyarrow.ArrowException) as error:
            raise unreadable(self.path, error) from error


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
        raise unreadable(path, error) from error


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
