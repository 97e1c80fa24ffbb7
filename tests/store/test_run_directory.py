from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollfeed
from rollfeed.errors import RunDirectoryError, RunFailedError
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.store import RunDirectory, RunReader
from rollfeed.types import Group, RunState

SETTINGS = {"seed": 1, "rollout": {"rollout_batch_size": 2}}
IDENTITY = {"seed": 1, "rollout.rollout_batch_size": 2}


def start(path: Path, *, identity: dict[str, object] = IDENTITY, overwrite: bool = False) -> RunDirectory:
    return RunDirectory.open(path, settings=SETTINGS, identity=identity, overwrite=overwrite)


def files_of(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def step_files(step: int) -> set[str]:
    tables = {f"{folder}/step-{step:06d}.parquet" for folder in ("batches", "dropped", "timings")}
    return tables | {f"states/step-{step:06d}.state"}


BASE_FILES = {"journal.sqlite", "metrics.jsonl", "run.lock", "settings.json", "steps.jsonl"}


@pytest.fixture
def two_steps(tmp_path, make_commit) -> Path:
    """An unfinished run with two committed steps."""
    path = tmp_path / "run"
    with start(path) as run:
        for step in (1, 2):
            run.commit(make_commit(step), reward_key=None)
    return path


def test_a_new_run_has_its_settings_and_no_state(tmp_path) -> None:
    path = tmp_path / "runs" / "demo"
    with start(path) as run:
        assert run.state is None
        assert run.steps() == ()
    assert json.loads((path / "settings.json").read_text()) == SETTINGS
    assert files_of(path) == BASE_FILES


def test_a_commit_leaves_its_files_and_nothing_temporary(tmp_path, make_commit) -> None:
    with start(tmp_path) as run:
        run.commit(make_commit(1), reward_key=None)
        run.commit(make_commit(2, num_dropped=0), reward_key=None)
    assert files_of(tmp_path) == BASE_FILES | step_files(1) | step_files(2) - {"dropped/step-000002.parquet"}


def test_metrics_has_one_line_a_step(two_steps) -> None:
    lines = [json.loads(line) for line in (two_steps / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["rollout/reward_mean"] == 0.5


def test_a_metric_that_is_not_finite_is_null(tmp_path, make_commit) -> None:
    commit = make_commit(1)
    commit.batch.metrics["rollout/reward_mean"] = float("nan")
    with start(tmp_path) as run:
        run.commit(commit, reward_key=None)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["rollout/reward_mean"] is None
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    start(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


def test_an_unfinished_run_goes_on_from_its_last_commit(two_steps, make_commit, plain) -> None:
    with start(two_steps) as run:
        assert plain(run.state) == plain(make_commit(2).state)
        run.commit(make_commit(3), reward_key=None)
        assert [record.step for record in run.steps()] == [1, 2, 3]


def test_a_failed_run_can_be_resumed(two_steps) -> None:
    with start(two_steps) as run:
        run.fail("reward function raised")
    with RunReader(two_steps) as reader:
        assert (reader.status(), reader.run().cause) == ("failed", "reward function raised")
    with start(two_steps) as run, RunReader(two_steps) as reader:
        assert isinstance(run.state, RunState)
        assert (reader.status(), reader.run().cause) == ("running", None)


def test_a_finished_run_is_refused_without_overwrite(two_steps) -> None:
    with start(two_steps) as run:
        run.finish()
    with pytest.raises(RunDirectoryError, match="holds a finished run; choose another --out, or replace it"):
        start(two_steps)


def test_a_step_is_committed_once(two_steps, make_commit) -> None:
    with start(two_steps) as run, pytest.raises(RunFailedError, match="step 2 cannot be stored: UNIQUE"):
        run.commit(make_commit(2), reward_key=None)


def test_overwrite_replaces_the_run_and_leaves_other_files_alone(two_steps) -> None:
    (two_steps / "notes.txt").write_text("mine")
    (two_steps / "batches" / "notes.txt").write_text("mine")
    with start(two_steps, identity={"seed": 2}, overwrite=True) as run:
        assert run.state is None
    assert files_of(two_steps) == BASE_FILES | {"notes.txt", "batches/notes.txt"}
    assert (two_steps / "metrics.jsonl").read_bytes() == b""


def test_x45_overwrite_removes_what_a_run_has_put_into_its_folders_and_nothing_else(two_steps) -> None:
    picture = f"{'0a' * 32}.png"
    ours = {
        *("checkpoints/step-000001/trainer.safetensors", "checkpoints/step-000001/digests.json"),
        *("checkpoints/warm-up/trainer.json", "checkpoints/.step-000002.tmp/trainer.json", "model/config.json"),
        *("model/model-00001-of-00002.safetensors", "model/additional_chat_templates/tool.jinja", ".model.tmp/a.json"),
        *(f"pictures/{picture}", "servers/0.log", "trackers/wandb.json", "trackers/wandb/run/file", "turns.log"),
    }
    theirs = {
        *("notes.txt", "checkpoints/best/trainer.safetensors", "checkpoints/step-000001/notes.txt", "checkpoints/list"),
        *(
            "model/notes/paper.json",
            "model/README.md",
            "pictures/holiday.png",
            "servers/config.log",
            "trackers/mine/log",
        ),
        *(
            "trackers/mine/log",
            "batches/step-000001.parquet.bak",
            "states/old/step-000001.state",
            "set-aside/1/settings.json",
        ),
    }
    for name in ours | theirs:
        (two_steps / name).parent.mkdir(parents=True, exist_ok=True)
        (two_steps / name).write_text(name)
    start(two_steps, overwrite=True).close()
    assert files_of(two_steps) == BASE_FILES | theirs
    assert not (two_steps / ".model.tmp").exists()


def test_differing_settings_are_named_with_both_values(two_steps) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        start(two_steps, identity={"seed": 2, "model": {"checkpoint": "other"}, "rollout.rollout_batch_size": 2})
    assert str(caught.value) == (
        f"{two_steps}: holds an unfinished run with other settings: "
        'model.checkpoint = unset there, "other" here; seed = 1 there, 2 here; '
        "choose another --out, or replace it with --overwrite "
        "(model.checkpoint decides which model samples and learns; seed decides all that is random)"
    )


def test_a_tuple_equals_the_list_it_is_stored_as(tmp_path) -> None:
    start(tmp_path, identity={"stop": ("a", "b"), "nested": {"x": (1,)}}).close()
    start(tmp_path, identity={"nested.x": [1], "stop": ["a", "b"]}).close()


def test_a_run_is_held_by_one_process_at_a_time(two_steps) -> None:
    with start(two_steps):
        with pytest.raises(RunDirectoryError, match=f"process {os.getpid()} is working on this run; stop it"):
            start(two_steps, overwrite=True)
        with RunReader(two_steps) as reader:
            assert reader.status() == "running"
    start(two_steps).close()


def is_a_file(path: Path) -> Path:
    path.write_text("")
    return path


def is_below_a_file(path: Path) -> Path:
    path.write_text("")
    return path / "run"


def holds_something_else(path: Path) -> Path:
    path.mkdir()
    (path / "thesis.tex").write_text("")
    return path


def holds_a_foreign_journal(path: Path) -> Path:
    path.mkdir()
    (path / "journal.sqlite").write_text("dear diary")
    return path


def lost_its_journal(path: Path) -> Path:
    (path / "batches").mkdir(parents=True)
    (path / "batches" / "step-000001.parquet").write_bytes(b"")
    return path


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (is_a_file, "is not a directory; choose another --out"),
        (is_below_a_file, "is not a directory; choose another --out"),
        (holds_something_else, "holds thesis.tex but no run; choose another --out"),
        (holds_a_foreign_journal, "journal.sqlite: is not a journal of rollfeed"),
        (lost_its_journal, "holds batches but no run"),
    ],
)
def test_what_is_not_a_run_is_refused_and_untouched(tmp_path, prepare, message, overwrite) -> None:
    path = prepare(tmp_path / "run")
    before = files_of(tmp_path)
    assert message in (RunDirectory.problem(path, identity=IDENTITY, overwrite=overwrite) or "")
    with pytest.raises(RunDirectoryError, match=message) as caught:
        start(path, overwrite=overwrite)
    assert "\n" not in str(caught.value)
    assert files_of(tmp_path) == before


def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(RunDirectoryError, match="choose another --out"):
        start(Path("/proc/rollfeed-run"))


def test_a_check_creates_nothing(tmp_path, two_steps) -> None:
    before = files_of(tmp_path)
    assert RunDirectory.problem(tmp_path / "new" / "run", identity=IDENTITY, overwrite=False) is None
    assert RunDirectory.problem(two_steps, identity=IDENTITY, overwrite=False) is None
    assert "seed = 1 there, 2 here" in (RunDirectory.problem(two_steps, identity={"seed": 2}, overwrite=False) or "")
    assert RunDirectory.problem(two_steps, identity={"seed": 2}, overwrite=True) is None
    assert files_of(tmp_path) == before


def test_a_journal_of_another_version_is_refused_but_can_be_replaced(two_steps) -> None:
    with sqlite3.connect(two_steps / "journal.sqlite") as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with pytest.raises(RunDirectoryError, match="has version 1, this rollfeed reads 3"):
        start(two_steps)
    with start(two_steps, overwrite=True) as run:
        assert run.state is None


def test_a_damaged_journal_is_refused_but_can_be_replaced(two_steps) -> None:
    journal = two_steps / "journal.sqlite"
    content = journal.read_bytes()
    journal.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    with pytest.raises(RunDirectoryError, match=r"journal\.sqlite: is damaged"):
        start(two_steps)
    start(two_steps, overwrite=True).close()


def test_a_start_that_died_before_there_was_a_journal_is_no_obstacle(tmp_path) -> None:
    for name in ("run.lock", ".journal.sqlite.tmp", ".journal.sqlite.tmp-journal"):
        (tmp_path / name).write_bytes(b"")
    start(tmp_path).close()
    assert files_of(tmp_path) == BASE_FILES


def leave_temporary_file(path: Path) -> None:
    (path / "batches" / ".step-000003.parquet.tmp").write_bytes(b"half")


def leave_uncommitted_files(path: Path) -> None:
    for folder in ("batches", "dropped", "timings"):
        shutil.copy(path / folder / "step-000002.parquet", path / folder / "step-000003.parquet")


def lose_last_metrics_line(path: Path) -> None:
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))


def tear_last_metrics_line(path: Path) -> None:
    content = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").write_bytes(content[:-7])


def leave_an_account_without_a_row(path: Path) -> None:
    with (path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step":3,"policy')


def leave_state_of_an_uncommitted_step(path: Path) -> None:
    (path / "states" / "step-000003.state").write_bytes(b"whole, but not committed")
    (path / "states" / ".step-000004.state.tmp").write_bytes(b"half")


def add_metrics_line(path: Path) -> None:
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":3}\n')


def lose_metrics(path: Path) -> None:
    (path / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    "crash",
    [
        leave_temporary_file,
        leave_uncommitted_files,
        leave_an_account_without_a_row,
        leave_state_of_an_uncommitted_step,
        lose_last_metrics_line,
        tear_last_metrics_line,
        add_metrics_line,
        lose_metrics,
    ],
)
def test_what_a_crash_left_is_put_right_at_the_next_start(
    two_steps, make_commit, crash: Callable[[Path], None]
) -> None:
    metrics = (two_steps / "metrics.jsonl").read_bytes()
    crash(two_steps)
    with start(two_steps) as run:
        assert run.state is not None
        assert run.state.next_step == 3
        assert files_of(two_steps) - {"journal.sqlite-wal", "journal.sqlite-shm"} == (
            BASE_FILES | step_files(1) | step_files(2)
        )
        assert (two_steps / "metrics.jsonl").read_bytes() == metrics
        run.commit(make_commit(3), reward_key=None)
    with RunReader(two_steps) as reader:
        assert [record.step for record in reader.steps()] == [1, 2, 3]
        assert len(reader.batch(3).groups) == 2


def test_a_disk_that_refuses_ends_the_run_and_keeps_what_is_committed(two_steps, make_commit) -> None:
    with start(two_steps) as run:
        (two_steps / "timings").rename(two_steps / "gone")
        with pytest.raises(RunFailedError, match="step 3 cannot be stored: No such file or directory; committed steps"):
            run.commit(make_commit(3), reward_key=None)
    (two_steps / "gone").rename(two_steps / "timings")
    with start(two_steps) as run:
        assert [record.step for record in run.steps()] == [1, 2]
        assert not (two_steps / "batches" / "step-000003.parquet").exists()


def test_a_commit_may_come_from_another_thread(tmp_path, make_commit) -> None:
    with start(tmp_path) as run, ThreadPoolExecutor() as pool:
        pool.submit(run.commit, make_commit(1), reward_key=None).result()
        assert len(run.steps()) == 1


def test_killing_the_process_at_any_instant_loses_no_committed_step(tmp_path) -> None:
    script = Path(__file__).with_name("commit_forever.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}
    path, instants, committed = tmp_path / "run", random.Random(0), 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            resumed_after = int(process.stdout.readline())
            assert resumed_after >= committed
            printed = [int(process.stdout.readline()) for _ in range(instants.randrange(3))]
            # The instant is what is tested: anywhere within the next commits.
            time.sleep(instants.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            committed = max([resumed_after, *printed, *map(int, process.stdout.read().split())])
        with RunReader(path) as reader:
            steps = [record.step for record in reader.steps()]
            assert steps == list(range(1, len(steps) + 1))
            assert len(steps) - committed in (0, 1)
            assert all(reader.batch(step).step == step and len(reader.dropped(step)) == 1 for step in steps[-2:])
    with RunDirectory.open(path, settings={}, identity={"seed": 1}, overwrite=False) as run:
        num_steps = len(run.steps())
        assert run.state is not None
        assert run.state.next_step == num_steps + 1
    assert files_of(path) == BASE_FILES.union(*(step_files(step) for step in range(1, num_steps + 1)))
    assert len((path / "metrics.jsonl").read_text().splitlines()) == num_steps


def test_what_was_spilled_is_gone_with_the_process(tmp_path: Path, make_group) -> None:
    group = make_group(1, [1.0])
    killed = start(tmp_path / "run")
    killed.spill.put(Group(1, group.prompt, group.rollouts))
    assert any((tmp_path / "run" / "spill").iterdir())
    killed._lock.release()  # a killed process does no more than that
    start(tmp_path / "run").close()
    assert not (tmp_path / "run" / "spill").exists()
    killed.close()


def test_isolation_level_is_stored_until_another_run_takes_the_place(
    tmp_path: Path, make_commit: Callable[..., object]
) -> None:
    isolation = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="tried")
    with start(tmp_path / "run") as directory:
        directory.record_isolation(isolation)
        directory.commit(make_commit(0), reward_key=None)
    stored = json.loads((tmp_path / "run" / "isolation.json").read_text())
    assert stored == {"level": "limits", "network_cut": False, "files_hidden": False, "detail": "tried"}
    with start(tmp_path / "run"):
        assert (tmp_path / "run" / "isolation.json").exists()
    with start(tmp_path / "run", overwrite=True):
        assert not (tmp_path / "run" / "isolation.json").exists()
