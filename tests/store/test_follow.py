"""A reader that follows a run sees each committed step once, whatever becomes of the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollfeed.errors import RunDirectoryError
from rollfeed.store import Rewind, RunDirectory, RunReader
from rollfeed.types import StepCommit

MakeCommit = Callable[[int], StepCommit]
PROGRAM = Path(__file__).parent / "commit_forever.py"


def start(path: Path, *, overwrite: bool = False, step: int | Rewind | None = None) -> RunDirectory:
    return RunDirectory.open(path, settings={}, identity={"seed": 1}, overwrite=overwrite, step=step)


def commit(run: RunDirectory, *commits: StepCommit) -> None:
    for each in commits:
        run.commit(each, reward_key=None)


@contextmanager
def in_a_thread(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_steps_come_when_they_are_committed_and_end_with_the_run(tmp_path: Path, make_commit: MakeCommit) -> None:
    taken: list[int] = []
    took_two = threading.Event()

    def make() -> None:
        with start(tmp_path / "run") as run:
            commit(run, make_commit(1), make_commit(2))
            took_two.wait(60)
            commit(run, make_commit(3))
            run.finish()

    with in_a_thread(make), RunReader(tmp_path / "run", wait_seconds=60) as reader:
        for record in reader.follow(1):
            taken.append(record.step)
            assert reader.batch(record.step).step == record.step
            if record.step == 2:
                took_two.set()
    assert taken == [1, 2, 3]


def test_a_run_that_is_killed_and_resumed_is_followed_to_its_end(tmp_path: Path, make_commit: MakeCommit) -> None:
    path = tmp_path / "run"
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(path)], stdout=subprocess.DEVNULL)
    try:
        with RunReader(path, wait_seconds=60) as reader:
            steps = reader.follow(1)
            taken = [next(steps).step for _ in range(3)]
            process.kill()
            process.wait()
            with start(path) as run:
                assert run.state is not None
                commit(run, make_commit(run.state.next_step))
                run.finish()
                last = run.state.next_step
            assert taken + [record.step for record in steps] == list(range(1, last + 1))
    finally:
        process.kill()
        process.wait()


def test_a_reader_that_was_opened_while_nobody_wrote_sees_what_comes(tmp_path: Path, make_commit: MakeCommit) -> None:
    with start(tmp_path) as run:
        commit(run, make_commit(1))
    assert not (tmp_path / "journal.sqlite-wal").exists()
    with RunReader(tmp_path) as reader:
        steps = reader.follow(1)
        assert next(steps).step == 1
        with start(tmp_path) as run:
            commit(run, make_commit(2))
            assert next(steps).step == 2
            assert reader.step(2).step == 2


def test_going_back_is_said_with_the_first_step_that_is_another(tmp_path: Path, make_commit: MakeCommit) -> None:
    with start(tmp_path) as run, RunReader(tmp_path) as reader:
        commit(run, *map(make_commit, (1, 2, 3)))
        steps = reader.follow(1)
        assert [next(steps).step for _ in range(3)] == [1, 2, 3]
        run.close()
        start(tmp_path, step=1).close()
        with pytest.raises(RunDirectoryError, match=r"from step 2 on, .* go on from what step 1 left, .*start=2"):
            next(steps)


def test_a_run_in_place_of_another_is_not_taken_for_it(tmp_path: Path, make_commit: MakeCommit) -> None:
    with start(tmp_path) as run, RunReader(tmp_path) as reader:
        commit(run, make_commit(1))
        steps = reader.follow(1)
        assert next(steps).step == 1
        run.close()
        with start(tmp_path, overwrite=True), pytest.raises(RunDirectoryError, match="from step 1 on"):
            next(steps)


def test_a_run_that_nobody_goes_on_with_is_an_error_with_the_remedy(tmp_path: Path, make_commit: MakeCommit) -> None:
    with start(tmp_path) as run:
        commit(run, make_commit(1))
    with RunReader(tmp_path) as reader:
        steps = reader.follow(1, patience_seconds=0.1)
        assert next(steps).step == 1
        with pytest.raises(RunDirectoryError, match=r"step 2 has not come, .* 0\.1 s: it is interrupted; .*--resume"):
            next(steps)


def test_a_run_that_has_failed_says_why(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        run.fail("no more disk")
    with RunReader(tmp_path) as reader, pytest.raises(RunDirectoryError, match="no more disk"):
        next(reader.follow(patience_seconds=0.0))


def test_a_journal_that_becomes_unreadable_is_no_endless_wait(tmp_path: Path, make_commit: MakeCommit) -> None:
    with start(tmp_path) as run, RunReader(tmp_path) as reader:
        commit(run, make_commit(1))
        (tmp_path / "steps.jsonl").write_bytes(b"{}")
        with pytest.raises(RunDirectoryError, match=r"steps\.jsonl: is damaged"):
            next(reader.follow(1, patience_seconds=0.1))


def test_an_event_loop_takes_steps_in_threads(tmp_path: Path, make_commit: MakeCommit) -> None:
    async def follow() -> list[int]:
        steps, taken = reader.follow(1), []
        while (record := await asyncio.to_thread(next, steps, None)) is not None:
            taken.append(record.step)
        return taken

    with start(tmp_path) as run:
        commit(run, make_commit(1), make_commit(2))
        run.finish()
    with RunReader(tmp_path) as reader:
        assert asyncio.run(follow()) == [1, 2]
        with pytest.raises(ValueError, match="start = -1"):
            next(reader.follow(-1))


def test_a_run_that_does_not_begin_in_time_is_said_not_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        RunReader(tmp_path / "none", wait_seconds=0.1)
