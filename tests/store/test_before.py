"""What earlier versions stored is read as they read it; ``before/records.json`` says how."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollfeed.store import RunReader
from rollfeed.store.codec import decode
from rollfeed.store.journal import Journal
from rollfeed.store.states import StateFiles
from rollfeed.types import Group, RunState

BEFORE = Path(__file__).parent / "before"
RECORDS = json.loads((BEFORE / "records.json").read_text(encoding="utf-8"))
KINDS = {"group": Group, "draw": Group, "state": RunState}


def assert_has(value: Any, expected: Any) -> None:
    """A value may have more fields than it had before."""
    if isinstance(expected, str) and isinstance(value, dict):
        assert (value["source"], value["content_hash"]) == (expected, "")  # pictures were their paths
    elif isinstance(expected, dict):
        for name, inner in expected.items():
            assert_has(value[name], inner)
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for each, inner in zip(value, expected, strict=True):
            assert_has(each, inner)
    else:
        assert value == expected or (math.isnan(value) and math.isnan(expected))


@pytest.fixture
def read(plain):
    return lambda record: json.loads(json.dumps(plain(record)))


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_earlier_versions_are_read(kind, version, read) -> None:
    encoded = (BEFORE / f"{kind}-{version}.msgpack").read_bytes()
    assert_has(read(decode(KINDS[kind], encoded)), RECORDS[f"{kind}-{version}"])


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_of_before_is_read(step, read) -> None:
    expected = RECORDS["run"][str(step)]
    with RunReader(BEFORE / "run") as run:
        assert_has(read(run.step(step)), expected["step"])
        assert_has(read(run.batch(step)), expected["batch"])
        assert_has(read(run.dropped(step)), expected["dropped"])
        assert_has(read(run.summaries(step)), expected["summaries"])


@pytest.mark.parametrize("step", [1, 2])
def test_a_state_of_before_is_gone_on_from(step, read) -> None:
    journal = Journal(BEFORE / "run" / "journal.sqlite", read_only=True)
    (entry,) = [entry for entry in journal.steps() if entry.step == step]
    journal.close()
    state = StateFiles(BEFORE / "run").read(entry)
    assert_has(read(state), RECORDS["states"][str(step)])
