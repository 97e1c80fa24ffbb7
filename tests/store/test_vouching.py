"""Whatever a run has is as it was written, or said not to be."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.base.atomic import Digest, digest_of, replace_digested
from rollfeed.errors import RunDirectoryError
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.store import RunDirectory, RunReader
from rollfeed.store.journal import Journal
from rollfeed.store.vouching import Rows
from rollfeed.store.vouching.sealed_rows import read_rows
from rollfeed.types import StepCommit

BEFORE = Path(__file__).parent / "before" / "run"
STEP_FOLDERS = ("batches", "dropped", "timings", "states")
NUM_STEPS = 3


def start(path: Path, *, step: int | None = None) -> RunDirectory:
    return RunDirectory.open(path, settings={"seed": 1}, identity={"seed": 1}, overwrite=False, step=step)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def all_values(path: Path, plain: Callable[[Any], Any]) -> Any:
    """Everything that a reader tells of a run."""
    with RunReader(path) as reader:
        steps = [record.step for record in reader.steps()]
        return (
            plain([reader.run(), reader.changes(), reader.steps(), reader.isolation(), reader.evaluations()]),
            reader.updates(),
            [plain([reader.batch(step), reader.dropped(step), reader.state(step)]) for step in steps],
        )


@pytest.fixture
def run(tmp_path: Path, make_commit: Callable[..., StepCommit]) -> Path:
    """A finished run of three steps that a trainer has written figures beside."""
    path = tmp_path / "run"
    with start(path) as directory:
        limits = Isolation(level=IsolationLevel.LIMITS, network_cut=False, files_hidden=False, detail="")
        directory.record_isolation(limits)
        for step in range(NUM_STEPS):
            directory.commit(make_commit(step), reward_key=None)
            with (path / "train.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "train/loss": 0.5}) + "\n")
        directory.finish()
    return path


def test_digests_are_those_of_what_was_written(tmp_path: Path) -> None:
    digest = replace_digested(tmp_path / "file", lambda file: [file.write(b"one"), file.write(b"two")])
    assert digest == digest_of(tmp_path / "file") == Digest(6, digest.sha256)
    assert digest_of(tmp_path / "file", size=3) == replace_digested(tmp_path / "part", lambda file: file.write(b"one"))


def test_the_journal_has_the_digest_of_every_file_of_a_step(run: Path) -> None:
    with RunReader(run) as reader:
        vouched = reader.vouched()
    for step in range(NUM_STEPS):
        files = vouched.steps[step]
        grown = {"train.jsonl"} if step else set()
        assert files.keys() == {*STEP_FOLDERS, *grown}
        for folder in STEP_FOLDERS:
            suffix = "state" if folder == "states" else "parquet"
            assert files[folder] == digest_of(run / folder / f"step-{step:06d}.{suffix}")
    assert vouched.run == {name: digest_of(run / name) for name in ("isolation.json", "train.jsonl")}


def test_the_journal_is_read_when_it_has_changed_and_not_for_every_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = 0

    def count(connection: sqlite3.Connection) -> Rows:
        nonlocal num_reads
        num_reads += 1
        return read_rows(connection)

    monkeypatch.setattr("rollfeed.store.journal.read_rows", count)
    start(run, step=2).close()
    assert num_reads == 3  # before and behind the lock, and to write
    journal = Journal(run / "journal.sqlite", read_only=False)
    try:
        assert journal.vouched().steps.keys() == {0, 1, 2}
        journal.forget(1, cause="")
        assert [entry.step for entry in journal.steps()] == [0]
        assert journal.vouched().steps.keys() == {0}
    finally:
        journal.close()


@pytest.mark.parametrize("folder", STEP_FOLDERS)
def test_x40_any_bit_of_a_step_file_is_missed_by_reader_and_resume(run: Path, plain, folder: str) -> None:
    whole, picks = all_values(run, plain), random.Random(folder)
    (path,) = (run / folder).glob("step-000001.*")
    content = path.read_bytes()
    for bit in [0, 8 * len(content) - 1, *(picks.randrange(8 * len(content)) for _ in range(20))]:
        flip(path, bit)
        with pytest.raises(RunDirectoryError) as caught:
            all_values(run, plain)
        assert f"{path}: is damaged: it is not what was written" in str(caught.value)
        assert f"go back to before step 1: rollfeed verify {run} --restore 0" in str(caught.value)
        path.write_bytes(content)
    flip(path, 99)
    with pytest.raises(RunDirectoryError, match=f"{path}: is damaged"):
        start(run, step=2)
    path.write_bytes(content)
    assert all_values(run, plain) == whole
    start(run, step=2).close()


@pytest.mark.parametrize("folder", STEP_FOLDERS)
def test_x40_files_that_are_missing_short_swapped_or_of_another_run_are_refused(
    run: Path, plain, tmp_path: Path, make_commit, folder: str
) -> None:
    (first,), (second,) = ((run / folder).glob(f"step-00000{step}.*") for step in (0, 1))
    with start(tmp_path / "other") as other:
        for step in range(2):
            other.commit(make_commit(step, seconds=0.25), reward_key=None)
    contents = (second.read_bytes(), first.read_bytes())
    for damage in (
        lambda: second.unlink(),
        lambda: second.write_bytes(b""),
        lambda: second.write_bytes(contents[0][:-1]),
        lambda: second.write_bytes(contents[0] + b"\0"),
        lambda: second.write_bytes(contents[1]),
        lambda: shutil.copyfile(tmp_path / "other" / folder / first.name, first),
    ):
        damage()
        if (first.read_bytes(), second.exists() and second.read_bytes()) == contents[::-1]:
            continue  # the other run has the same there
        with pytest.raises(RunDirectoryError, match=r"step-00000[01].* is (missing|damaged)"):
            all_values(run, plain)
        with pytest.raises(RunDirectoryError, match=r"step-00000[01].* is (missing|damaged)"):
            start(run, step=2)
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])


def test_x40_edited_rewards_are_refused(run: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = run / "batches" / "step-000001.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index("reward")
    rewards = pa.array([1.0] * table.num_rows, table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), rewards), path)
    with RunReader(run) as reader:
        reader.state(1)  # which has a file of its own
        for read in (reader.batch, reader.summaries, lambda step: list(reader.rows(step))):
            with pytest.raises(RunDirectoryError, match="is damaged"):
                read(1)


def test_x40_a_flipped_bit_of_the_journal_changes_nothing_that_is_read(run: Path) -> None:
    path, picks = run / "journal.sqlite", random.Random(1)

    def read() -> Any:
        journal = Journal(path, read_only=True)
        try:
            return journal.run(), journal.steps(), journal.changes(), journal.vouched()
        finally:
            journal.close()

    whole, content, num_refused = read(), path.read_bytes(), 0
    for _ in range(400):
        flip(path, picks.randrange(8 * len(content)))
        try:
            assert read() == whole
        except RunDirectoryError as error:
            num_refused += str(error).startswith(str(path))
        path.write_bytes(content)
    assert num_refused > 10


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run SET settings = '{\"seed\": 2}'",
        "UPDATE run SET status = 'failed'",
        "UPDATE steps SET record_end = record_end + 1 WHERE step = 1",
        "UPDATE vouched SET files = '{}' WHERE step = 1",
        "UPDATE vouched SET files = '{}' WHERE step = -1",
        "DELETE FROM steps WHERE step = 2",
        "DELETE FROM vouched WHERE step = 2",
        "DELETE FROM vouched WHERE step = -1",
        "INSERT INTO changes VALUES (1, 'seed', '1', '2')",
        "DROP TABLE vouched",
        "PRAGMA user_version = 2",
    ],
)
def test_x40_rows_that_change_come_or_go_are_noticed(run: Path, statement: str) -> None:
    with sqlite3.connect(run / "journal.sqlite") as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(RunDirectoryError, match=r"journal\.sqlite: is damaged"):
        RunReader(run)
    with pytest.raises(RunDirectoryError, match=r"journal\.sqlite: is damaged"):
        start(run, step=1)


def test_x40_last_rows_that_go_with_their_seals_are_noticed(run: Path) -> None:
    with sqlite3.connect(run / "journal.sqlite") as connection:
        for table in ("steps", "vouched"):
            connection.execute(f"DELETE FROM {table} WHERE step = 2")
    connection.close()
    with pytest.raises(RunDirectoryError, match="the row of the run, or of a change in its settings"):
        RunReader(run)


def test_x40_figures_of_a_trainer_are_checked_as_far_as_they_went_at_the_last_step(run: Path) -> None:
    path = run / "train.jsonl"
    lines = path.read_bytes()
    path.write_bytes(lines.replace(b"0.5", b"0.7", 1))
    with RunReader(run) as reader, pytest.raises(RunDirectoryError, match=r"train\.jsonl: is damaged"):
        reader.updates()
    path.write_bytes(lines + lines[:-1])  # what came after the end, or is still being written
    with RunReader(run) as reader:
        assert set(reader.updates()) == {0, 1, 2}


def test_a_run_of_an_earlier_version_is_read_and_gone_on_with(tmp_path: Path, make_commit) -> None:
    shutil.copytree(BEFORE, tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        last, settings, identity = reader.steps()[-1].step, reader.run().settings, reader.run().identity
        assert reader.vouched().steps == {}
    with RunDirectory.open(
        tmp_path / "run", settings=settings, identity=identity, overwrite=False, step=last
    ) as directory:
        directory.commit(make_commit(last + 1), reward_key=None)
    with RunReader(tmp_path / "run") as reader:
        vouched = reader.vouched().steps
        assert {step: bool(files) for step, files in vouched.items()} == {1: False, 2: False, 3: True}
        assert [len(reader.batch(step).groups) > 0 for step in vouched] == [True] * 3
