"""The turn journal on the disk: what is there after a kill, and what is gone after a commit."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollfeed.protocols import RolloutRequest
from rollfeed.store import RunDirectory
from rollfeed.store.turns import TurnFile
from rollfeed.testing import make_prompt
from rollfeed.types import (
    Answered,
    Called,
    Completion,
    CompletionTimings,
    FinishKind,
    FinishReason,
    Group,
    RunState,
    Sampled,
    SamplingParams,
    VersionSpan,
)


def request(group_index: int, rollout_id: int = 0) -> RolloutRequest:
    return RolloutRequest(
        prompt=make_prompt(),
        params=SamplingParams(max_new_tokens=1),
        group_index=group_index,
        index=rollout_id,
        rollout_id=rollout_id,
        step=0,
        max_context_length=10,
    )


def state(next_step: int, next_group_index: int, *in_flight: int) -> RunState:
    groups = tuple(Group(index, make_prompt()) for index in in_flight)
    return RunState(next_step=next_step, next_group_index=next_group_index, source={}, in_flight=groups)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.log"


@pytest.fixture
def journal(path: Path) -> Iterator[TurnFile]:
    """Return the journal of a run that has nothing committed."""
    made = TurnFile(path, None)
    yield made
    made.close()


def answers(file: TurnFile, group_index: int) -> list[object]:
    return [turn.answer for turn in file.turns(request(group_index))]


def test_every_turn_is_there_again_and_no_file_without_one(path: Path, journal: TurnFile) -> None:
    completion = Completion(
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.5, -1.25], np.float32),
        text="ab",
        finish_reason=FinishReason(FinishKind.STOP, "b"),
        version_spans=(VersionSpan(0, 1, 3), VersionSpan(1, 2, 4)),
        precision="fp32",
        prompt_tokens=7,
        cached_tokens=1,
        timings=CompletionTimings(0.5, 1.5),
    )
    journal.forget(0, step=0)
    journal.committed(1)
    assert not path.exists()
    turns = [Sampled(np.array([1, 2], np.int32), completion), Called("t", {"a": [1, None]}), Answered("x")]
    for turn in turns:
        journal.write(request(3, 1), turn)
    sampled, *others = TurnFile(path, None).turns(request(3, 1))
    assert others == turns[1:]
    assert sampled.sent.tolist() == [1, 2]
    assert sampled.completion.logprobs.tolist() == [-0.5, -1.25]
    assert repr(sampled) == repr(turns[0])


def test_what_a_step_forgets_is_gone_when_it_is_committed_and_not_before(path: Path, journal: TurnFile) -> None:
    journal.write(request(0), Answered("ended"))
    journal.write(request(1), Answered("begins again"))
    for group_index in (0, 1):
        journal.forget(group_index, step=4)
    copy = path.read_bytes()
    assert answers(TurnFile(path, state(4, 2, 0, 1)), 0) == ["ended"]
    path.write_bytes(copy)
    assert answers(TurnFile(path, state(5, 2, 1)), 1) == []
    for committed in (state(4, 2, 0, 1), state(5, 2, 1)):
        path.write_bytes(copy)
        journal.close()
        journal.write(request(1), Answered("again"))
        assert answers(TurnFile(path, committed), 1) == ["again"]


def test_a_group_that_the_commit_knows_nothing_of_is_dropped_unless_it_is_new(path: Path, journal: TurnFile) -> None:
    for group_index in range(3):
        journal.write(request(group_index), Answered(group_index))
    restored = TurnFile(path, state(1, 2, 1))
    assert [answers(restored, group_index) for group_index in range(3)] == [[], [1], [2]]


def test_a_turn_that_is_half_written_ends_the_file(path: Path, journal: TurnFile) -> None:
    journal.write(request(0), Answered("whole"))
    size = path.stat().st_size
    journal.write(request(0), Answered("half"))
    content = path.read_bytes()
    for end in range(size, len(content)):
        path.write_bytes(content[:end])
        assert answers(TurnFile(path, None), 0) == ["whole"]
        assert path.stat().st_size == size


def test_a_commit_leaves_no_file_where_all_is_forgotten(path: Path, journal: TurnFile) -> None:
    journal.write(request(0), Answered("x"))
    asyncio.run(journal.flush())
    journal.forget(0, step=0)
    journal.committed(1)
    assert not path.exists()
    journal.write(request(1), Answered("y"))
    assert answers(TurnFile(path, state(1, 1)), 1) == ["y"]


@pytest.mark.parametrize("go_back", [{"step": 1}, {"overwrite": True}])
def test_what_was_done_goes_back_with_the_run(tmp_path: Path, make_commit, go_back: dict[str, object]) -> None:
    def start(**options: object) -> RunDirectory:
        return RunDirectory.open(tmp_path, settings={}, identity={}, **{"overwrite": False, **options})

    with start() as directory:
        for step in (1, 2):
            directory.commit(make_commit(step), reward_key=None)
        directory.turns.write(request(10_000), Answered("x"))
    with start() as directory:
        assert len(directory.turns.turns(request(10_000))) == 1
    with start(**go_back) as directory:
        assert not directory.turns.turns(request(10_000))
