"""Groups as Parquet files and back.

The same records give the same bytes: no times are written, rows keep the order of the batch, and
row groups end where groups of rollouts end, so that one group can be read without the others.

Whoever reads a file raises RunDirectoryError if it is missing, damaged or of another version; who makes a table
RunFailedError if a label, metadata or message is not JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollfeed.errors import RunDirectoryError
from rollfeed.store.tables.schema import (
    ADVANTAGES_OF_TOKENS,
    BATCH_SCHEMA,
    DROPPED_SCHEMA,
    KEYS,
    SCHEMA_VERSION,
    TIMING_COLUMNS,
    TIMINGS_SCHEMA,
    columns_of,
    from_row,
    to_row,
    with_rare_columns,
)
from rollfeed.types import (
    Advantages,
    Correct,
    Dropped,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Sample,
    SampleStatus,
    TrainBatch,
    Verdict,
    mean_reward,
)

if TYPE_CHECKING:
    import pyarrow.compute as pc

Timings = Mapping[tuple[int, int | None, int | None], Mapping[str, Any]]
"""What differs between two runs of one seed, by (group index, rollout id, index)."""
_NO_SAMPLE = {**dict.fromkeys(columns_of(Sample)), "status": SampleStatus.FAILED.value}
_NO_ROLLOUT, _NO_VERDICT = dict.fromkeys(columns_of(Rollout)), dict.fromkeys(columns_of(Verdict))
_KEY = itemgetter(*KEYS)
_NO_TIMES = dict.fromkeys(column.name for column in TIMING_COLUMNS)
_ROW_GROUP_TOKENS = 1 << 18  # a row group ends with the group that reaches it: a few MB in memory
_ROWS_AT_A_TIME = 256
_LARGEST_OFFSET = 2**31 - 1
_VARIED = ("token_ids.list.element", "logprobs.list.element", "response")
"""Columns in which values hardly repeat: looking for repetition takes most of the time, and more space in the end."""


def batch_table(batch: TrainBatch, *, reward_key: str | None) -> pa.Table:
    """Return a batch as rows, one a sample."""
    common = {"step": batch.step, "policy_version": batch.policy_version}
    rows = [{**row, **common} for group in batch.groups for row in _rows(group, reward_key)]
    penalties_S = [None] * len(rows) if batch.penalties_S is None else batch.penalties_S.tolist()
    for row, advantage, penalty in zip(rows, batch.advantages_S, penalties_S, strict=True):
        row |= {"advantage": advantage, "penalty": penalty}
    schema = BATCH_SCHEMA
    if isinstance(batch.advantages_S, tuple):
        schema = schema.set(schema.get_field_index("advantage"), ADVANTAGES_OF_TOKENS)
    return _table(rows, with_rare_columns(schema, rows))


def dropped_table(dropped: Sequence[Dropped], *, step: int, policy_version: int, reward_key: str | None) -> pa.Table:
    """Return dropped groups as rows; a rollout without samples, and a group without rollouts, has one row."""
    common = {"step": step, "policy_version": policy_version, "advantage": None, "penalty": None}
    rows = [{**row, **common, **to_row(drop)} for drop in dropped for row in _rows(drop.group, reward_key)]
    return _table(rows, with_rare_columns(DROPPED_SCHEMA, rows))


def timings_table(groups: Sequence[Group]) -> pa.Table:
    """Return what differs between two runs of one seed, one row for each of theirs in the other files."""
    rows = []
    for group in groups:
        for rollout, sample in _rollouts_and_samples(group):
            row = {**_NO_TIMES, "group_index": group.group_index}
            if rollout is not None:
                row |= {"rollout_id": rollout.rollout_id, **to_row(rollout, varies=True)}
            if sample is not None:
                row |= {"index": sample.index, **to_row(sample, varies=True)}
            rows.append(row)
    return _table(rows, TIMINGS_SCHEMA)


def write_table(table: pa.Table, file: IO[bytes]) -> None:
    """Write a table; a row group ends where a group of rollouts ends."""
    repetitive = [name for name in _leaf_columns(table.schema) if name not in _VARIED]
    with pq.ParquetWriter(
        file, table.schema, compression="zstd", use_dictionary=repetitive, write_statistics=repetitive
    ) as writer:
        for start, end in _row_groups(table):
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)


def read_batch(path: Path, *, metrics: Mapping[str, float], timings: Timings) -> TrainBatch:
    """Return the batch of a file that is not empty."""
    with _explained(path):
        table = _read(path)
        groups = tuple(_group(rows, timings) for rows in _groups_of(table))
        return TrainBatch(
            step=table["step"][0].as_py(),
            policy_version=table["policy_version"][0].as_py(),
            groups=groups,
            advantages_S=_advantages(table["advantage"]),
            metrics=dict(metrics),
            penalties_S=_penalties(table),
        )


def read_groups(
    path: Path, *, group_index: int | None = None, timings: Timings
) -> tuple[tuple[Group, str | None], ...]:
    """Return the groups of a file, or only the one with ``group_index``, and why each was dropped, if it was."""
    with _explained(path):
        groups = _groups_of(_read(path, *(() if group_index is None else (group_index,))))
        return tuple((_group(rows, timings), rows[0].get("drop_reason")) for rows in groups)


def read_columns(
    path: Path, columns: Sequence[str], condition: pc.Expression | None = None, *, is_versioned: bool = True
) -> list[dict[str, Any]]:
    """Return the rows of a file that fulfil a condition, with a few of its columns, without reading the others.

    Files of evaluations are not ``is_versioned``; those of earlier versions have no messages, which are null then.
    """
    with _explained(path):
        if is_versioned:
            _check_version(path)
        missing = [] if is_versioned or "messages" in pq.read_schema(path).names else ["messages"]
        known = [name for name in columns if name not in missing]
        table = pq.read_table(path, columns=known, filters=condition, partitioning=None)
        return [{**dict.fromkeys(missing), **row} for row in table.to_pylist()]


def least_value(path: Path, column: str) -> float:
    """Return the least number of a column as the file's statistics have it; minus infinity where they do not."""
    with _explained(path):
        metadata = pq.read_metadata(path)
        at = metadata.schema.names.index(column)
        found = [metadata.row_group(number).column(at).statistics for number in range(metadata.num_row_groups)]
        known = [each.min for each in found if each is not None and each.has_min_max]
        return min(known) if len(known) == len(found) and known else -math.inf


def read_group_rows(path: Path, group_indices: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of groups that a file has, as they lie there, by group index; lists of numbers are arrays."""
    with _explained(path):
        return {rows[0]["group_index"]: rows for rows in _groups_of(_read(path, *group_indices))}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file one by one, lists of numbers as arrays; records are not made of them, nor checked."""
    with _explained(path):
        _check_version(path)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                for rows in _groups_of(pa.Table.from_batches([batch])):
                    yield from rows


def read_timings(path: Path, *, group_index: int | None = None) -> Timings:
    """Return what differs between two runs of one seed, by row."""
    with _explained(path):
        rows = _read(path, *(() if group_index is None else (group_index,))).to_pylist()
        return {(row["group_index"], row["rollout_id"], row["index"]): row for row in rows}


def _rows(group: Group, reward_key: str | None) -> Iterator[dict[str, Any]]:
    shared = {**to_row(group.prompt), "group_index": group.group_index}
    for rollout, sample in _rollouts_and_samples(group):
        row = _NO_SAMPLE | {} if sample is None else to_row(sample)
        if sample is not None and not sample.extra:
            row["extra"] = None
        if sample is not None and reward_key is not None and isinstance(sample.reward, dict):
            row["reward"] = sample.reward.get(reward_key)
        row |= _NO_ROLLOUT if rollout is None else to_row(rollout)
        own = row["correct"]
        if rollout is None or rollout.verdict is None:
            row |= _NO_VERDICT
        else:
            row |= to_row(rollout.verdict)
            if len(rollout.samples) > 1:
                row["correct"] = own
        row |= shared
        yield row


def _rollouts_and_samples(group: Group) -> Iterator[tuple[Rollout | None, Sample | None]]:
    if not group.rollouts:
        yield None, None
    for rollout in group.rollouts:
        if not rollout.samples:
            yield rollout, None
        for sample in rollout.samples:
            yield rollout, sample


def _check_version(path: Path) -> None:
    version = (pq.read_schema(path).metadata or {}).get(b"rollfeed.schema")
    if version != str(SCHEMA_VERSION).encode():
        found = "no rollfeed.schema" if version is None else f"rollfeed.schema {version.decode()}"
        raise RunDirectoryError(f"{path}: has {found}, this rollfeed reads {SCHEMA_VERSION}")


def _read(path: Path, *group_indices: int) -> pa.Table:
    """Return the rows of some groups, or all."""
    _check_version(path)
    filters = [("group_index", "in", group_indices)] if group_indices else None
    return pq.read_table(path, filters=filters, partitioning=None)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn whatever a missing, damaged or foreign file raises into one line."""
    try:
        yield
    except FileNotFoundError:
        raise RunDirectoryError(f"{path}: is missing; it was written once and has been removed since") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunDirectoryError):
            raise
        reason = " ".join(str(error).split())
        raise RunDirectoryError(f"{path}: is damaged or not a file of rollfeed: {reason}") from error


def _groups_of(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    values = [
        [_array(scalar) for scalar in column] if _is_numbers(column.type) else column.to_pylist()
        for column in table.columns
    ]
    rows = [dict(zip(table.column_names, row, strict=True)) for row in zip(*values, strict=True)]
    for _, members in groupby(rows, key=itemgetter("group_index")):
        yield list(members)


def _advantages(column: pa.ChunkedArray) -> Advantages:
    if _is_numbers(column.type):
        return tuple(scalar.values.to_numpy(zero_copy_only=False).copy() for scalar in column)
    return np.array(column.to_pylist(), np.float32)


def _penalties(table: pa.Table) -> NDArray[np.float32] | None:
    """Return the penalties; None where there are none, or no such column, as in files of earlier versions."""
    is_without = "penalty" not in table.column_names or table["penalty"].null_count
    return None if is_without else np.array(table["penalty"].to_pylist(), np.float32)


def _array(scalar: pa.ListScalar) -> NDArray[Any] | None:
    # A copy: a view would keep the whole file's tokens in memory for one sample's.
    return scalar.values.to_numpy(zero_copy_only=False).copy() if scalar.is_valid else None


def _group(rows: Sequence[dict[str, Any]], timings: Timings) -> Group:
    for row in rows:
        row |= timings.get(_KEY(row), {})
    started = [row for row in rows if row["rollout_id"] is not None]
    rollouts = tuple(_rollout(list(members)) for _, members in groupby(started, key=itemgetter("rollout_id")))
    return Group(group_index=rows[0]["group_index"], prompt=from_row(Prompt, rows[0]), rollouts=rollouts)


def _rollout(rows: Sequence[dict[str, Any]]) -> Rollout:
    first = rows[0]
    samples = tuple(from_row(Sample, row) for row in rows if row["index"] is not None)
    rewards = [sample.reward for sample in samples]
    is_ok = first["outcome"] == Outcome.OK
    verdict = None
    if first["outcome"] is not None and ((rewards and None not in rewards) or not is_ok):
        reward = mean_reward(rewards) if is_ok else None
        verdict = from_row(Verdict, first, reward=reward, correct=Correct(rows[-1]["correct"]))
    return from_row(Rollout, first, samples=samples, verdict=verdict)


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows, each with all fields of the schema, as a table."""
    arrays = [_column([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _is_numbers(kind: pa.DataType) -> bool:
    """Tell whether a value is a list of numbers."""
    return bool(pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type))


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    is_joined = _is_numbers(kind) and values and all(isinstance(value, np.ndarray) for value in values)
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
