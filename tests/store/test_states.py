"""What each step writes of a state: what is new in it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rollfeed.store.journal import StepEntry
from rollfeed.store.json_text import to_json
from rollfeed.store.layout import STATES
from rollfeed.store.states import StateFiles
from rollfeed.types import RunState


@pytest.fixture
def states(tmp_path: Path) -> StateFiles:
    (tmp_path / STATES).mkdir()
    return StateFiles(tmp_path)


def entry_of(step: int, written: tuple[int, int]) -> StepEntry:
    return StepEntry(step=step, record_end=0, record_checksum=0, state_size=written[0], state_checksum=written[1])


def state_of(step: int, **source: Any) -> RunState:
    return RunState(next_step=step + 1, next_group_index=0, source=source)


def long_text(number: int) -> str:
    return Random(number).randbytes(20_000).hex()


def test_a_long_text_of_the_source_is_written_once(states: StateFiles, tmp_path: Path) -> None:
    sizes = []
    for step in range(4):
        texts = [long_text(0), long_text(1)] if step else [long_text(0)]
        state = state_of(step, cursor=step, inner={"texts": texts, "": None, "short": "x"})
        written = states.write(step, state)
        sizes.append(written[0])
        assert StateFiles(tmp_path).read(entry_of(step, written)) == state
    assert sizes[2] == sizes[3] < min(sizes[:2])


def test_after_a_resume_too(states: StateFiles, tmp_path: Path) -> None:
    first = entry_of(0, states.write(0, state_of(0, text=long_text(5))))
    resumed = StateFiles(tmp_path)
    resumed.read(first)
    size, checksum = resumed.write(1, state_of(1, text=long_text(5)))
    assert size < 1000
    assert resumed.read(entry_of(1, (size, checksum))).source["text"] == long_text(5)


def test_a_step_that_is_written_again_has_its_text_in_its_own_file(states: StateFiles, tmp_path: Path) -> None:
    text = long_text(5)
    first = entry_of(0, states.write(0, state_of(0, cursor=0)))
    for step in (1, 2):
        states.write(step, state_of(step, text=text))
    states.read(first)
    for step in (1, 1, 2):
        written = states.write(step, state_of(step, text=text))
    assert StateFiles(tmp_path).read(entry_of(2, written)).source["text"] == text


@pytest.mark.parametrize("text", ["\ud800" * 5000, '"\\\n\x00' * 2000])
def test_any_text_comes_back(states: StateFiles, text: str) -> None:
    nested: Any = text
    for _ in range(30):
        nested = [nested]
    state = state_of(0, text=text, nested=nested, cut="x" * 4096, numbers={"1": text})
    expected = json.loads(to_json(state.source, "it"))
    assert states.read(entry_of(0, states.write(0, state))).source == expected
