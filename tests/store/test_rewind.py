from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rollfeed
from rollfeed.errors import RunDirectoryError
from rollfeed.store import Rewind, RunDirectory, RunReader
from rollfeed.types import Group, StepCommit

IDENTITY = {"seed": 1}
NUM_STEPS = 5


def start(path: Path, *, step: int | None = None, overwrite: bool = False) -> RunDirectory:
    return RunDirectory.open(path, settings={"seed": 1}, identity=IDENTITY, overwrite=overwrite, step=step)


def content_of(path: Path) -> dict[str, bytes]:
    """Every file but the lock, which says who had it last."""
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    files.pop("run.lock", None)
    return files


def steps_of(path: Path) -> list[int]:
    with RunReader(path) as reader:
        return [record.step for record in reader.steps()]


@pytest.fixture
def make_step(make_commit: Callable[..., StepCommit], make_group) -> Callable[[int], StepCommit]:
    """A step that leaves a partial group in the buffer, one in flight, and one that waits from the first step on."""

    def make(step: int) -> StepCommit:
        commit = make_commit(step)
        waiting, partial, flying = (make_group(1000 + number, [1.0, 0.0]) for number in (0, step, 100 + step))
        state = replace(
            commit.state,
            requeued=tuple(Group(group.group_index, group.prompt, group.rollouts) for group in (waiting, partial)),
            in_flight=(Group(flying.group_index, flying.prompt, flying.rollouts[:1]),),
            surplus=(make_group(2000, [0.5, 0.5]),),
        )
        return replace(commit, state=state)

    return make


@pytest.fixture
def run(tmp_path: Path, make_step: Callable[[int], StepCommit]) -> Path:
    """An unfinished run with steps 1 to 5."""
    path = tmp_path / "run"
    with start(path) as directory:
        for step in range(1, NUM_STEPS + 1):
            directory.commit(make_step(step), reward_key=None)
    return path


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_every_committed_step_can_be_gone_back_to(run: Path, make_step, plain, step: int) -> None:
    with start(run, step=step) as directory:
        assert plain(directory.state) == plain(make_step(step).state)
        assert [record.step for record in directory.steps()] == list(range(1, step + 1))
        names = {path.name for path in run.rglob("step-*")}
        assert {int(name[5:11]) for name in names} == set(range(1, step + 1))
        assert (run / "metrics.jsonl").read_text().count("\n") == step
        directory.commit(make_step(step + 1), reward_key=None)
    with start(run) as directory:
        assert plain(directory.state) == plain(make_step(step + 1).state)


def test_steps_made_anew_equal_those_of_a_run_that_never_went_back(run: Path, make_step) -> None:
    before = content_of(run)
    with start(run, step=2) as directory:
        for step in range(3, NUM_STEPS + 1):
            directory.commit(make_step(step), reward_key=None)
    after = content_of(run)
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} <= {"journal.sqlite"}


def test_going_back_twice_is_going_back_once_to_the_earlier_step(run: Path, make_step, plain) -> None:
    start(run, step=4).close()
    start(run, step=2).close()
    with start(run) as directory:
        assert plain(directory.state) == plain(make_step(2).state)


def test_a_finished_run_is_gone_on_with_from_a_step(run: Path) -> None:
    with start(run) as directory:
        directory.finish()
    with pytest.raises(RunDirectoryError, match=rf"holds a finished run; .* --resume {run} --step N"):
        start(run)
    with start(run, step=5) as directory:
        assert directory.state is not None
        assert directory.state.next_step == 6
    with RunReader(run) as reader:
        assert reader.status() == "interrupted"


def test_a_group_that_waits_is_written_once(run: Path, make_step) -> None:
    first, *later = [path.stat().st_size for path in sorted((run / "states").iterdir())]
    assert all(size < 0.8 * first for size in later)


def test_a_step_that_a_refused_disk_left_half_is_no_part_of_the_next_state(run: Path, make_step, plain) -> None:
    with start(run) as directory:
        directory._journal.close()  # so that the state is on disk and its row is not
        with pytest.raises(Exception, match="closed database"):
            directory.commit(make_step(6), reward_key=None)
    with start(run) as directory:
        directory.commit(make_step(6), reward_key=None)
    with start(run) as directory:
        assert plain(directory.state) == plain(make_step(6).state)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (6, "has no step 6 to go back to; it has steps 1 to 5"),
        (0, "has no step 0 to go back to; it has steps 1 to 5"),
        (-1, "has no step -1 to go back to; it has steps 1 to 5"),
    ],
)
def test_a_step_that_is_not_there_is_refused_and_nothing_changes(run: Path, step: int, message: str) -> None:
    before = content_of(run)
    assert message in (RunDirectory.problem(run, identity=IDENTITY, overwrite=False, step=step) or "")
    with pytest.raises(RunDirectoryError, match=message):
        start(run, step=step)
    assert content_of(run) == before


def test_replacing_a_run_and_going_back_in_it_is_refused(run: Path) -> None:
    with pytest.raises(RunDirectoryError, match="leave out --overwrite or --step"):
        start(run, step=2, overwrite=True)


def test_a_run_without_steps_has_none_to_go_back_to(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    with pytest.raises(RunDirectoryError, match="has no step 0 to go back to; no step is committed yet"):
        start(tmp_path / "run", step=0)


def test_no_directory_is_made_for_going_back(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist; give the directory that `rollfeed run` wrote"):
        start(tmp_path / "run", step=0)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(RunDirectoryError, match="holds no run, and so no step 0"):
        start(tmp_path / "run", step=0)


def flip_a_byte_at(position: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 0xFF
        path.write_bytes(content)

    return damage


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "is damaged: it has "),
        (Path.unlink, "is missing"),
        *((flip_a_byte_at(position), "is damaged: ") for position in (0.02, 0.3, 0.6, 0.9, 1.0)),
    ],
)
@pytest.mark.parametrize("step", [None, 3, 5])
def test_a_damaged_state_is_refused_and_nothing_changes(run: Path, damage, message: str, step: int | None) -> None:
    file = run / "states" / f"step-{step or NUM_STEPS:06d}.state"
    damage(file)
    before = content_of(run)
    with pytest.raises(RunDirectoryError) as caught:
        start(run, step=step)
    assert f"{file}: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content_of(run) == before


def test_an_earlier_step_is_still_there_when_the_last_state_is_damaged(run: Path, make_step, plain) -> None:
    cut_short(run / "states" / "step-000005.state")
    with start(run, step=4) as directory:
        assert plain(directory.state) == plain(make_step(4).state)


def test_a_group_in_an_earlier_file_that_is_damaged_is_found(run: Path) -> None:
    flip_a_byte_at(0.0)(run / "states" / "step-000001.state")
    with pytest.raises(RunDirectoryError, match=r"states/step-000001\.state: is damaged"):
        start(run)


@pytest.mark.parametrize("damage", [cut_short, flip_a_byte_at(0.5), Path.unlink])
def test_a_damaged_account_is_refused_and_nothing_changes(run: Path, damage) -> None:
    damage(run / "steps.jsonl")
    before = content_of(run)
    with pytest.raises(RunDirectoryError, match=r"steps\.jsonl: is (missing|damaged)"):
        start(run)
    with RunReader(run) as reader, pytest.raises(RunDirectoryError, match=r"steps\.jsonl"):
        reader.steps()
    assert content_of(run) == before


def test_a_kill_while_going_back_leaves_the_old_step_or_the_new_one(run: Path, make_step, plain) -> None:
    script = Path(__file__).with_name("killed_rewind.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}
    subprocess.run([sys.executable, script, run], env=environment, check=True)
    found: list[int] = []
    for number in range(1, sum(1 for _ in run.parent.glob("run-*")) + 1):
        copy = run.with_name(f"run-{number}")
        last = steps_of(copy)[-1]
        found.append(last)
        with start(copy) as directory:
            assert plain(directory.state) == plain(make_step(last).state)
            directory.commit(make_step(last + 1), reward_key=None)
        assert {int(path.name[5:11]) for path in copy.rglob("step-*")} == set(range(1, last + 2))
    assert found == sorted(found, reverse=True)
    assert set(found) == {NUM_STEPS, 2}
    assert len(found) > 15


def test_where_data_files_are_is_stored(tmp_path: Path) -> None:
    folders = [tmp_path / "settings", tmp_path]
    RunDirectory.open(tmp_path / "run", settings={}, identity={}, overwrite=False, folders=folders).close()
    with RunReader(tmp_path / "run") as reader:
        assert reader.run().folders == tuple(map(str, folders))


def test_changed_settings_are_kept_with_the_step_that_they_begin_at(run: Path, make_step) -> None:
    def open_with(rate: float, *, step: int | None = None) -> RunDirectory:
        return RunDirectory.open(
            run, settings={"seed": 1, "rate": rate}, identity=IDENTITY, overwrite=False, step=step, folders=()
        )

    def changes() -> list[tuple[int, str, object, object]]:
        with RunReader(run) as reader:
            return [(change.step, change.key, change.old, change.new) for change in reader.changes()]

    assert changes() == []
    with open_with(0.1) as directory:
        directory.commit(make_step(NUM_STEPS + 1), reward_key=None)
    first = (NUM_STEPS + 1, "rate", None, 0.1)
    assert changes() == [first]
    open_with(0.1).close()
    assert changes() == [first]
    open_with(0.2).close()
    open_with(0.3).close()  # no step was made with 0.2
    assert changes() == [first, (NUM_STEPS + 2, "rate", 0.1, 0.3)]
    open_with(0.1).close()
    assert changes() == [first]
    open_with(0.4, step=3).close()
    assert changes() == [(4, "rate", None, 0.4)]
    RunDirectory.open(
        run, settings={"seed": 1, "rate": 0.5}, identity=IDENTITY, overwrite=False, step=Rewind.START
    ).close()
    assert changes() == []
