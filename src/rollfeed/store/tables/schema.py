"""The columns of the Parquet files; docs/parquet.md says what each one holds.

One row is one sample. Times and cache counters live in files of their own, so that two runs of one
seed leave byte-identical batch files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or goes; stored in each file as ``rollfeed.schema``."""

_STRINGS = pa.list_(pa.field("element", pa.string()))
_INT32S = pa.list_(pa.field("element", pa.int32()))
_FLOATS = pa.list_(pa.field("element", pa.float32()))
ADVANTAGES_OF_TOKENS = pa.field("advantage", _FLOATS)
"""The column of a batch that has one advantage a response token."""
_SPANS = pa.list_(
    pa.field("element", pa.struct([("start", pa.int32()), ("end", pa.int32()), ("policy_version", pa.int64())]))
)

BATCH_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("step", pa.int64()),
    ("policy_version", pa.int64()),
    ("group_index", pa.int64()),
    ("rollout_id", pa.int64()),
    ("index", pa.int64()),
    ("token_ids", _INT32S),
    ("response_length", pa.int32()),
    ("loss_mask", _FLOATS),
    ("logprobs", _FLOATS),
    ("spans", _SPANS),
    ("advantage", pa.float32()),
    ("penalty", pa.float32()),
    ("status", pa.string()),
    ("reward", pa.float64()),
    ("rewards", pa.string()),
    ("response", pa.string()),
    ("label", pa.string()),
    ("metadata", pa.string()),
    ("images", _STRINGS),
    ("precision", pa.string()),
    ("remove_sample", pa.bool_()),
    ("extra", pa.string()),
    ("correct", pa.string()),
    ("format_ok", pa.bool_()),
    ("extracted", pa.string()),
    ("outcome", pa.string()),
    ("detail", pa.string()),
    ("error", pa.string()),
    ("prompt_id", pa.string()),
    ("source", pa.string()),
    ("prompt", pa.string()),
    ("prompt_token_ids", _INT32S),
    ("messages", pa.string()),
    ("prompt_label", pa.string()),
    ("prompt_metadata", pa.string()),
    ("tools", pa.string()),
    ("prompt_images", _STRINGS),
)

TIMING_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("group_index", pa.int64()),
    ("rollout_id", pa.int64()),
    ("index", pa.int64()),
    ("seconds", pa.float64()),
    ("non_generation_seconds", pa.float64()),
    ("cached_tokens", pa.int32()),
)


def _schema(kind: str, columns: tuple[tuple[str, pa.DataType], ...]) -> pa.Schema:
    return pa.schema(columns, metadata={"rollfeed.schema": str(SCHEMA_VERSION), "rollfeed.kind": kind})


BATCH_SCHEMA = _schema("batch", BATCH_COLUMNS)
"""``batches/step-N.parquet``: the samples of the groups that were kept."""
DROPPED_SCHEMA = _schema("dropped", (*BATCH_COLUMNS, ("drop_reason", pa.string())))
"""``dropped/step-N.parquet``: the same of the groups that were not, and why."""
TIMINGS_SCHEMA = _schema("timings", TIMING_COLUMNS)
"""``timings/step-N.parquet``: what differs between two runs of one seed; kept and dropped groups alike."""


def with_sampling_masks(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Return the schema with the two columns that files have in which a sample has a sampling mask."""
    for name in ("sampling_mask_lengths", "sampling_mask_token_ids"):
        if any(row[name] is not None for row in rows):
            schema = schema.append(pa.field(name, _INT32S))
    return schema
