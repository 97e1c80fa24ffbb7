from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from rollfeed.errors import RunDirectoryError
from rollfeed.protocols import Isolation, IsolationLevel
from rollfeed.store import RunDirectory, RunReader, question_of
from rollfeed.types import Correct, Dropped, Group, LedgerCounts, Rollout, SampleStatus, StepCommit


def start(path: Path) -> RunDirectory:
    return RunDirectory.open(path, settings={"seed": 1}, identity={"seed": 1}, overwrite=False)


@pytest.fixture
def finished(tmp_path, make_commit) -> Path:
    path = tmp_path / "run"
    with start(path) as run:
        for step in (1, 2):
            run.commit(make_commit(step), reward_key=None)
        run.finish()
    return path


def test_batches_and_dropped_groups_come_back_as_delivered(finished, make_commit, plain) -> None:
    with RunReader(finished) as reader:
        assert plain(reader.batch(2)) == plain(make_commit(2).batch)
        assert plain(reader.dropped(2)) == plain(make_commit(2).dropped)


def test_a_step_record_says_what_the_step_was(finished) -> None:
    with RunReader(finished) as reader:
        record = reader.step(2)
    assert (record.step, record.policy_version, record.num_groups, record.num_samples) == (2, 7, 2, 4)
    assert (record.num_dropped, record.drop_reasons, record.wasted_tokens) == (1, {"zero_std_0.0": 1}, {"dropped": 5})
    assert record.response_tokens == 10
    assert record.metrics["rollout/reward_mean"] == 0.5
    assert record.ledger == LedgerCounts(drawn=6, trained=4, dropped=2)


def test_totals_and_ledger_cover_the_run(finished) -> None:
    with RunReader(finished) as reader:
        totals = reader.totals()
        assert (totals.num_steps, totals.num_groups, totals.num_samples, totals.num_dropped) == (2, 4, 8, 2)
        assert (totals.response_tokens, totals.wasted_tokens) == (20, 10)
        assert reader.ledger() == LedgerCounts(drawn=6, trained=4, dropped=2)


def test_isolation_level_comes_back_as_it_was_recorded(tmp_path) -> None:
    isolation = Isolation(level=IsolationLevel.BUBBLEWRAP, network_cut=True, files_hidden=True, detail="tried")
    with start(tmp_path) as run, RunReader(tmp_path) as reader:
        assert reader.isolation() is None
        run.record_isolation(isolation)
        assert reader.isolation() == isolation


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"level": "none"}', '{"level": "limits"}', "\udcff"])
def test_isolation_record_that_is_damaged_is_named(finished, text: str) -> None:
    (finished / "isolation.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with RunReader(finished) as reader, pytest.raises(RunDirectoryError, match=r"isolation\.json: cannot be read"):
        reader.isolation()


def test_summaries_have_kept_and_dropped_groups_by_index(finished) -> None:
    with RunReader(finished) as reader:
        groups = reader.summaries(2)
    assert [(group.group_index, group.drop_reason) for group in groups] == [(3, None), (4, None), (5, "zero_std_0.0")]
    assert groups[0].question == "What is 3 + 1?"
    assert [member.reward for member in groups[0].members] == [1.0, 0.0]
    assert [member.correct for member in groups[0].members] == [Correct.YES, Correct.NO]
    assert [member.response_length for member in groups[0].members] == [2, 3]


def test_one_group_is_found_in_any_step_kept_or_dropped(finished, make_commit, plain) -> None:
    commit = make_commit(2)
    with RunReader(finished) as reader:
        kept, dropped = reader.group(4), reader.group(5)
        assert (kept.step, kept.drop_reason, plain(kept.group)) == (2, None, plain(commit.batch.groups[1]))
        assert (dropped.step, dropped.drop_reason) == (2, "zero_std_0.0")
        assert plain(dropped.group) == plain(commit.dropped[0].group)
        with pytest.raises(RunDirectoryError, match="no step has group 99; `rollfeed show` lists"):
            reader.group(99)
        with pytest.raises(RunDirectoryError, match="step 1 has no group 4"):
            reader.group(4, step=1)


def test_a_group_that_failed_without_samples_is_shown(tmp_path, make_commit) -> None:
    commit = make_commit(1, num_dropped=0)
    failed = Group(
        group_index=9,
        prompt=commit.batch.groups[0].prompt,
        rollouts=(Rollout(rollout_id=90, samples=(), error="engine is gone"),),
    )
    dropped = (Dropped(group=failed, reason="failed"),)
    with start(tmp_path) as run:
        run.commit(
            StepCommit(batch=commit.batch, dropped=dropped, wasted_tokens={}, state=commit.state), reward_key=None
        )
    with RunReader(tmp_path) as reader:
        (member,) = reader.summaries(1)[-1].members
        assert (member.index, member.status, member.error) == (None, SampleStatus.FAILED, "engine is gone")
        assert reader.group(9).group.rollouts[0].error == "engine is gone"


def test_status_tells_running_from_interrupted_from_finished(tmp_path, finished) -> None:
    run = start(tmp_path / "other")
    with RunReader(tmp_path / "other") as reader:
        assert (reader.status(), reader.steps(), reader.ledger()) == ("running", (), LedgerCounts())
        run.close()
        assert reader.status() == "interrupted"
    with RunReader(finished) as reader:
        assert reader.status() == "finished"


def test_a_reader_follows_a_run_that_goes_on(tmp_path, make_commit) -> None:
    with start(tmp_path) as run, RunReader(tmp_path) as reader:
        run.commit(make_commit(1), reward_key=None)
        assert [record.step for record in reader.steps()] == [1]
        run.commit(make_commit(2), reward_key=None)
        assert reader.batch(2).step == 2


def test_reading_leaves_no_files(finished) -> None:
    before = {path.name for path in finished.rglob("*")}
    with RunReader(finished) as reader:
        reader.batch(1)
    assert {path.name for path in finished.rglob("*")} == before


def test_files_of_steps_that_are_not_committed_are_not_shown(finished) -> None:
    shutil.copy(finished / "batches" / "step-000002.parquet", finished / "batches" / "step-000003.parquet")
    with RunReader(finished) as reader:
        assert [record.step for record in reader.steps()] == [1, 2]
        with pytest.raises(RunDirectoryError, match="has no step 3; it has steps 1 to 2"):
            reader.batch(3)


def test_what_is_not_a_run_directory_is_one_line(tmp_path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory: it has no journal"):
        RunReader(tmp_path)
    with pytest.raises(RunDirectoryError, match="does not exist; give the directory"):
        RunReader(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is not a directory; give the directory"):
        RunReader(tmp_path / "file")


def test_a_removed_batch_file_is_named(finished) -> None:
    (finished / "batches" / "step-000001.parquet").unlink()
    with RunReader(finished) as reader, pytest.raises(RunDirectoryError, match=r"step-000001\.parquet: is missing"):
        reader.batch(1)


def test_a_locked_journal_is_one_clear_line(finished) -> None:
    connection = sqlite3.connect(finished / "journal.sqlite", isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("UPDATE run SET cause = 'x'")
    try:
        with pytest.raises(RunDirectoryError, match=r"cannot be opened: .*locked by another program") as caught:
            RunReader(finished).steps()
        assert "\n" not in str(caught.value)
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([], "the prompt"),
        ([{"role": "system", "content": "be brief"}], "the prompt"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
            "c",
        ),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}], "[image]\nwhat?"),
    ],
)
def test_the_question_is_the_last_user_message(messages, question) -> None:
    assert question_of("the prompt", messages) == question
