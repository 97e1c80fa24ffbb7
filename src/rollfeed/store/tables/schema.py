"""The columns of the Parquet files, from the fields of the records; docs/parquet.md lists them.

One row is one sample. What differs between two runs of one seed lives in files of its own, so that they leave
byte-identical batch files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from rollfeed.errors import RunFailedError
from rollfeed.store.json_text import of_record, to_json
from rollfeed.types import Dropped, Prompt, Reward, Rollout, Sample, TrainBatch, Verdict
from rollfeed.types.fields import (
    Convert,
    Kind,
    RecordField,
    cached,
    compiled,
    documentation,
    fields_of,
    from_plain_form,
    is_named_tuple,
    plain_form,
    same,
)
from rollfeed.types.text import well_formed

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or goes; stored in each file as ``rollfeed.schema``."""

KEYS = ("group_index", "rollout_id", "index")
"""Columns that name a row in all files."""
_ELSEWHERE = {Rollout: ("samples", "verdict"), Verdict: ("reward",), Dropped: ("group",)}
"""Fields that need no columns, as others say the same."""
_NAMES = {
    Sample: {"version_spans": "spans"},
    Prompt: {"text": "prompt", **{name: f"prompt_{name}" for name in ("token_ids", "label", "metadata", "images")}},
    Dropped: {"reason": "drop_reason"},
}
"""Columns that are not called as their fields."""
_SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_Record = TypeVar("_Record")


class Column(NamedTuple):
    """A column, and what it says to those who read it."""

    name: str
    type: pa.DataType
    meaning: str
    of: Convert = same
    """From the field's value to the column's."""


class FieldColumns(NamedTuple):
    """The columns of a field: one, or several where a value has parts."""

    field: RecordField
    columns: tuple[Column, ...]
    join: Convert
    """From the columns' values to the field's."""
    is_rare: bool = False
    """Whether only files have them in which a sample has what they hold."""


def to_row(record: Any, *, varies: bool = False) -> dict[str, Any]:
    """Return a record's values by column: of the fields that differ between two runs of one seed, or of the others.

    Raises:
        RunFailedError: If a label, metadata or message is not JSON.
    """
    try:
        row: dict[str, Any] = _row_of(type(record), varies)(record)
    except RunFailedError as error:
        raise of_record(record, error) from None
    return row


def columns_of(record: type) -> list[str]:
    """Return the names of a record's columns, without those of what varies."""
    return [column.name for each in field_columns(record) for column in each.columns]


@cached
def _row_of(record: type, varies: bool) -> Convert:
    known = field_columns(record, varies=varies)
    return compiled((column.name, each.field.name, column.of) for each in known for column in each.columns)


def from_row(record: type[_Record], row: Mapping[str, Any], **values: Any) -> _Record:
    """Return a record from a row, and from ``values``, which go before.

    A field has its default where its columns are null or missing, as they are in files from before there were these.
    """
    single, several = _plan_of_record(record)
    for field, column, join in single:
        found = row.get(column)
        if found is not None and field not in values:
            values[field] = found if join is same else join(found)
    for field, columns, join in several:
        parts = [row.get(column) for column in columns]
        if any(part is not None for part in parts) and field not in values:
            values[field] = join(*parts)
    return record(**values)


@cached
def _plan_of_record(record: type) -> tuple[list[tuple[str, str, Convert]], list[tuple[str, list[str], Convert]]]:
    known = (*field_columns(record), *field_columns(record, varies=True))
    named = [(each.field.name, [column.name for column in each.columns], each.join) for each in known]
    single = [(field, columns[0], join) for field, columns, join in named if len(columns) == 1]
    return single, [each for each in named if len(each[1]) > 1]


@cached
def field_columns(record: type, *, varies: bool = False) -> tuple[FieldColumns, ...]:
    """Return the fields that differ between two runs of one seed, or the others, with their columns."""
    texts, names = documentation(record), _NAMES.get(record, {})
    return tuple(
        _columns(field, names.get(field.name, field.name), texts.get(field.name, "").replace("``", "`").rstrip("."))
        for field in fields_of(record)
        if field.varies is varies and field.name not in _ELSEWHERE.get(record, ())
    )


def _columns(field: RecordField, name: str, text: str) -> FieldColumns:
    plain, read = plain_form(field), from_plain_form(field)
    of = field.type
    match field.kind:
        case Kind.NUMBER:
            kind, plain = pa.int32() if field.is_short else _SCALARS[of], same
        case Kind.TEXT:
            kind, plain = pa.string(), field.lifted(well_formed, list)
        case Kind.CHOICE:
            kind, text = pa.string(), text + ": " + ", ".join(f"`{choice.value}`" for choice in of)
        case Kind.ARRAY:
            kind, plain, read = _list(pa.from_numpy_dtype(of)), same, same
        case Kind.JSON:
            write = partial(_optional_json if field.is_optional else to_json, what=field.name)
            column = Column(name, pa.string(), f"{text}; JSON", write)
            return FieldColumns(field, (column,), json.loads if read is same else lambda text: read(json.loads(text)))
        case Kind.REWARD:
            named = Column(
                f"{name}s", pa.string(), "The named rewards, where the reward is these; JSON", _named_rewards
            )
            return FieldColumns(field, (Column(name, pa.float64(), text, _one_reward), named), _joined_reward)
        case Kind.RECORD if is_named_tuple(of):
            kind = pa.struct([column[:2] for each in field_columns(of) for column in each.columns])
            plain, read = field.lifted(of._asdict, list), field.lifted(lambda value: of(**value))
        case Kind.RECORD if field.is_many:
            kind = pa.struct([column[:2] for each in field_columns(of) for column in each.columns])
        case Kind.RECORD:
            parts = [Column(f"{name}_{part.name}", *part[1:3], partial(_part, part.name)) for part in _parts(of)]
            return FieldColumns(field, tuple(parts), of, is_rare=True)
    column = Column(name, _list(kind) if field.is_many else kind, text, plain)
    return FieldColumns(field, (column,), read, is_rare=field.kind is Kind.ARRAY and field.is_optional)


def _parts(record: type) -> list[Column]:
    return [column for each in field_columns(record) for column in each.columns]


def _part(name: str, record: Any) -> Any:
    return None if record is None else getattr(record, name)


def _optional_json(value: Any, what: str) -> str | None:
    return None if value is None else to_json(value, what)


def _one_reward(reward: Reward | None) -> float | None:
    return None if reward is None or isinstance(reward, dict) else float(reward)


def _named_rewards(reward: Reward | None) -> str | None:
    return to_json(reward, "reward") if isinstance(reward, dict) else None


def _joined_reward(number: float | None, named: str | None) -> Any:
    return number if named is None else json.loads(named)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


def _by_name(*records: type, varies: bool = False, is_rare: bool = False) -> dict[str, Column]:
    """Return the columns of rows that are several records; one that they share is the first one's."""
    found: dict[str, Column] = {}
    for each in chain.from_iterable(field_columns(record, varies=varies) for record in records):
        for column in each.columns if each.is_rare is is_rare else ():
            found.setdefault(column.name, column)
    return found


_SHARED = _by_name(Sample, Verdict, Rollout, Prompt)
_NAMING = tuple(_SHARED.pop(name) for name in KEYS)
BATCH_COLUMNS = (
    Column("step", pa.int64(), "The step, from 0"),
    Column("policy_version", pa.int64(), documentation(TrainBatch)["policy_version"].rstrip(".")),
    *_NAMING,
    Column(
        "advantage",
        pa.float32(),
        "What the sample is trained with, to be spread over its trained tokens; null for dropped groups. Where "
        "`plugins.advantage` returns one a token, the file has `list<float>` here, one a response token. `(R,)`",
    ),
    Column(
        "penalty",
        pa.float32(),
        "What `[reward.overlong]` added to the reward before advantages were computed; null without it, and for "
        "dropped groups",
    ),
    *_SHARED.values(),
)
DROPPED_COLUMNS = (*BATCH_COLUMNS, *_by_name(Dropped).values())
TIMING_COLUMNS = (*_NAMING, *_by_name(Rollout, Sample, varies=True).values())
RARE_COLUMNS = tuple(_by_name(Sample, is_rare=True).values())
"""Columns of files in which a sample has what they hold; they come last."""
ADVANTAGES_OF_TOKENS = pa.field("advantage", _list(pa.float32()))
"""The column of a batch that has one advantage a response token."""


def _schema(kind: str, columns: Sequence[Column]) -> pa.Schema:
    metadata = {"rollfeed.schema": str(SCHEMA_VERSION), "rollfeed.kind": kind}
    return pa.schema([column[:2] for column in columns], metadata=metadata)


BATCH_SCHEMA = _schema("batch", BATCH_COLUMNS)
"""``batches/step-N.parquet``: the samples of the groups that were kept."""
DROPPED_SCHEMA = _schema("dropped", DROPPED_COLUMNS)
"""``dropped/step-N.parquet``: the same of the groups that were not, and why."""
TIMINGS_SCHEMA = _schema("timings", TIMING_COLUMNS)
"""``timings/step-N.parquet``: what differs between two runs of one seed; kept and dropped groups alike."""


def with_rare_columns(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Return the schema with the columns that only files have in which a sample has what they hold."""
    for column in RARE_COLUMNS:
        if any(row[column.name] is not None for row in rows):
            schema = schema.append(pa.field(*column[:2]))
    return schema
