"""Batches, dropped groups and timings as Parquet files."""

from rollfeed.store.tables.columns import write_table
from rollfeed.store.tables.parquet import (
    batch_table,
    dropped_table,
    read_batch,
    read_columns,
    read_dropped,
    read_groups,
    read_timings,
    timings_table,
)

__all__ = [
    "batch_table",
    "dropped_table",
    "read_batch",
    "read_columns",
    "read_dropped",
    "read_groups",
    "read_timings",
    "timings_table",
    "write_table",
]
