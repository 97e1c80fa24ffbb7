"""Rows as columns, and columns as the bytes of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_ROW_GROUP_TOKENS = 1 << 18  # a row group ends with the group that reaches it: a few MB in memory
_LARGEST_OFFSET = 2**31 - 1
_VARIED = ("token_ids.list.element", "logprobs.list.element", "response")
"""Columns in which values hardly repeat: looking for repetition takes most of the time, and more space in the end."""


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows, each with all fields of the schema, as a table."""
    arrays = [_column([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def write_table(table: pa.Table, file: IO[bytes]) -> None:
    """Write a table; a row group ends where a group of rollouts ends."""
    repetitive = [name for name in _leaf_columns(table.schema) if name not in _VARIED]
    with pq.ParquetWriter(
        file, table.schema, compression="zstd", use_dictionary=repetitive, write_statistics=repetitive
    ) as writer:
        for start, end in _row_groups(table):
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)


def is_numbers(kind: pa.DataType) -> bool:
    """Tell whether a value is a list of numbers."""
    return bool(pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type))


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    is_joined = is_numbers(kind) and values and all(isinstance(value, np.ndarray) for value in values)
    offsets = np.cumsum([0, *map(len, values)]) if is_joined else np.empty(0, np.int64)
    if not is_joined or offsets[-1] > _LARGEST_OFFSET:
        return pa.array(values, type=kind)
    # Several times as fast as handing over one array after the other.
    joined = pa.array(np.concatenate(values), type=kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), joined, type=kind)


def _leaf_columns(schema: pa.Schema) -> list[str]:
    """Return the paths of the columns as Parquet has them."""
    paths = []
    for field in schema:
        if not pa.types.is_list(field.type):
            paths.append(field.name)
            continue
        element = field.type.value_field
        inner = [f".{each.name}" for each in element.type] if pa.types.is_struct(element.type) else [""]
        paths += [f"{field.name}.list.{element.name}{name}" for name in inner]
    return paths


def _row_groups(table: pa.Table) -> Iterator[tuple[int, int]]:
    groups = table["group_index"].to_pylist()
    lengths = [0] * len(groups)
    if "token_ids" in table.column_names:
        lengths = [len(scalar) if scalar.is_valid else 0 for scalar in table["token_ids"]]
    start = tokens = 0
    for row, length in enumerate(lengths):
        tokens += length
        is_last_of_group = row + 1 == len(groups) or groups[row + 1] != groups[row]
        if is_last_of_group and (tokens >= _ROW_GROUP_TOKENS or row + 1 == len(groups)):
            yield start, row + 1
            start, tokens = row + 1, 0
