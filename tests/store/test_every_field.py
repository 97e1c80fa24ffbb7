"""Every field of a record, present or future, comes back from every form that is stored or sent."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from rollfeed.store.codec import decode, encode
from rollfeed.store.tables.parquet import dropped_table, read_groups, read_timings, timings_table, write_table
from rollfeed.types import Dropped, Group, Outcome, Prompt, Rollout, Sample, Verdict
from rollfeed.types.fields import Kind, RecordField, fields_of, from_dict, to_dict

NUM_TOKENS, NUM_RESPONSE_TOKENS = 5, 3
SHARED = {"group_index": 6, "index": 40, "rollout_id": 8, "response_length": NUM_RESPONSE_TOKENS}


def a_value(field: RecordField) -> Any:
    """Return a value that is not the field's default."""
    match field.kind:
        case Kind.NUMBER:
            value: Any = SHARED.get(field.name, field.type(7.5 if field.type is float else 1))
        case Kind.TEXT:
            value = f"the {field.name}"
        case Kind.CHOICE:
            value = Outcome.OK if field.type is Outcome else list(field.type)[1]
        case Kind.ARRAY:
            value = np.arange(NUM_TOKENS if field.name == "token_ids" else NUM_RESPONSE_TOKENS).astype(field.type)
        case Kind.JSON:
            value = {field.name: [1, None, "ä"]}
        case Kind.REWARD:
            value = {"score": 0.25, "acc": 1.0}
        case Kind.RECORD:
            values = {inner.name: a_value(inner) for inner in fields_of(field.type)}
            if field.name == "version_spans":
                values |= {"start": 0, "end": NUM_RESPONSE_TOKENS}
            elif field.name == "sampling_mask":
                values = {"lengths": np.array([0, 2, 3], np.int32), "token_ids": np.arange(5, dtype=np.int32)}
            value = field.type(**values)
    return (value,) if field.is_many else value


def whole(record: type, **values: Any) -> Any:
    made = {field.name: a_value(field) for field in fields_of(record)}
    flags = {each.name: not each.default for each in fields(record) if isinstance(each.default, bool)}
    return record(**{**made, **flags, **values})


@pytest.fixture
def group() -> Group:
    verdict = whole(Verdict)
    sample = replace(whole(Sample), correct=verdict.correct)
    rollout = whole(Rollout, samples=(sample,), verdict=verdict)
    return Group(group_index=SHARED["group_index"], prompt=whole(Prompt), rollouts=(rollout,))


def test_no_field_is_left_as_it_would_be_by_default(group) -> None:
    for record in (group.prompt, group.samples[0], group.rollouts[0], group.rollouts[0].verdict):
        required = {field.name: getattr(record, field.name) for field in fields_of(type(record)) if field.is_required}
        default = to_dict(type(record)(**required))
        written = to_dict(record)
        same = [name for name in written if name not in required and written[name] == default[name]]
        assert same in ([], ["outcome"])  # another outcome has no reward


def test_every_field_comes_back_from_bytes(group, plain) -> None:
    assert plain(decode(Group, encode(group))) == plain(group)


def test_every_field_comes_back_from_columns(group, plain, tmp_path) -> None:
    for name, table in (
        ("dropped", dropped_table([Dropped(group=group, reason="r")], step=0, policy_version=0, reward_key=None)),
        ("timings", timings_table([group])),
    ):
        file = io.BytesIO()
        write_table(table, file)
        (tmp_path / name).write_bytes(file.getvalue())
    ((read, reason),) = read_groups(tmp_path / "dropped", timings=read_timings(tmp_path / "timings"))
    assert (plain(read), reason) == (plain(group), "r")


def test_every_field_comes_back_from_dictionaries(group, plain) -> None:
    sample, verdict = group.samples[0], group.rollouts[0].verdict
    assert plain(Sample.from_dict(json.loads(json.dumps(sample.to_dict())))) == plain(sample)
    for record in (group.prompt, verdict):
        assert plain(from_dict(type(record), json.loads(json.dumps(to_dict(record))))) == plain(record)
