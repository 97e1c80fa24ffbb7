"""What each step writes of a state: what is new in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rollfeed.base.atomic import Digest
from rollfeed.store.codec import encode
from rollfeed.store.journal import StepEntry
from rollfeed.store.json_text import to_json
from rollfeed.store.layout import STATES
from rollfeed.store.states import StateFiles
from rollfeed.testing import group_of, make_prompt, sample_of
from rollfeed.types import Rollout, RunState


@pytest.fixture
def states(tmp_path: Path) -> StateFiles:
    (tmp_path / STATES).mkdir()
    return StateFiles(tmp_path)


def entry_of(step: int, written: tuple[Digest, int]) -> StepEntry:
    return StepEntry(step=step, record_end=0, record_checksum=0, state_size=written[0].size, state_checksum=written[1])


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
        sizes.append(written[0].size)
        assert StateFiles(tmp_path).read(entry_of(step, written)) == state
    assert sizes[2] == sizes[3] < min(sizes[:2])


def test_after_a_resume_too(states: StateFiles, tmp_path: Path) -> None:
    first = entry_of(0, states.write(0, state_of(0, text=long_text(5))))
    resumed = StateFiles(tmp_path)
    resumed.read(first)
    written = resumed.write(1, state_of(1, text=long_text(5)))
    assert written[0].size < 1000
    assert resumed.read(entry_of(1, written)).source["text"] == long_text(5)


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


def test_members_of_groups_in_flight_are_written_once_each(states: StateFiles, tmp_path: Path) -> None:
    samples = [sample_of(range(50), Random(member).sample(range(1_000_000), 5_000), reward=1.0) for member in range(3)]
    whole = group_of(samples, prompt=make_prompt())
    sizes = []
    for num_answered in range(4):
        have = tuple(
            each if member < num_answered else Rollout(rollout_id=each.rollout_id, samples=())
            for member, each in enumerate(whole.rollouts)
        )
        group = replace(whole, rollouts=have if num_answered else ())
        state = replace(state_of(num_answered), in_flight=(group,))
        written = states.write(num_answered, state)
        sizes.append(written[0].size)
        read = StateFiles(tmp_path).read(entry_of(num_answered, written))
        assert encode(read) == encode(state)
    first, *others = sizes
    assert first < 2_000
    assert max(others) < 1.1 * min(others)


def test_a_member_that_changes_is_written_again(states: StateFiles, tmp_path: Path) -> None:
    group = group_of([sample_of([1], [2, 3], reward=1.0), sample_of([1], [4], reward=0.0)], prompt=make_prompt())
    changed = replace(group, rollouts=(replace(group.rollouts[0], seconds=7.0), group.rollouts[1]))
    for step, each in enumerate((group, group, changed)):
        state = replace(state_of(step), in_flight=(each,), surplus=(replace(each, group_index=9),))
        written = states.write(step, state)
        assert encode(StateFiles(tmp_path).read(entry_of(step, written))) == encode(state)
