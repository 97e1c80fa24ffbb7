"""A run of which nothing is believed is recounted, and taken back to a step that is whole."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rollfeed import app
from rollfeed.app.verifying import Recounted, file_checks, restore_run, verify_run
from rollfeed.base.atomic import seal_folder
from rollfeed.cli.main import main
from rollfeed.config import RolloutConfig
from rollfeed.errors import RunDirectoryError
from rollfeed.prompts import ChatRenderer, ColumnKeys, DatasetSource, load_prompts
from rollfeed.store import RunDirectory, RunReader
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.types import Prompt, Sample, StepCommit

NUM_STEPS = 4
BEFORE = Path(__file__).parents[1] / "store" / "before" / "run"
SETTINGS = {"seed": 1}
Tamper = Callable[[StepCommit], StepCommit]


async def digit(sample: Sample, prompt: Prompt) -> float:
    del prompt
    return float(sample.response)


def source(folder: Path) -> DatasetSource:
    path = folder / "questions.jsonl"
    rows = [{"question": f"question {number}", "answer": str(number)} for number in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    renderer = ChatRenderer(CharTokenizer(), rollout_max_prompt_len=None)
    keys = ColumnKeys(input_key="question", label_key="answer")
    loaded = load_prompts(str(path), name="questions", renderer=renderer, keys=keys)
    return DatasetSource(loaded, rollout_shuffle=True, seed=7)


async def make(out: Path, *, until: int = NUM_STEPS, tamper: Tamper = lambda commit: commit) -> None:
    """Make steps, or those that are left; each commit passes ``tamper``."""
    config = RolloutConfig(
        rollout={
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "over_sampling_batch_size": 5,
            "deterministic": True,
        },
        filters={"dynamic_sampling": [{"name": "reward_std"}]},
        plugins={"reward": digit},
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with RunDirectory.open(out, settings=SETTINGS, identity=SETTINGS, overwrite=False) as directory:
        rollouts = app.open_rollouts(
            config,
            source=source(out.parent),
            engine=ScriptedEngine(),
            tokenizer=CharTokenizer(),
            state=directory.state,
            commit=lambda commit: directory.commit(tamper(commit), reward_key=None),
        )
        async with rollouts:
            while rollouts.next_step < until:
                await rollouts.generate_batch()
        (out / "train.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(until)))
        if until == NUM_STEPS:
            directory.finish()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    asyncio.run(make(out))
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run, with dropped groups and some that wait."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def contents(path: Path) -> Iterator[bytes]:
    return (file.read_bytes() for file in path.rglob("*") if file.is_file())


def found_in(path: Path) -> list[tuple[Recounted, str]]:
    return [(each.kind, each.place) for each in verify_run(path, lints=False).found]


def test_a_run_that_is_as_it_was_written_has_no_findings(run: Path) -> None:
    found = verify_run(run, lints=False)
    assert (found.found, found.num_steps, found.last_good, found.not_vouched) == ([], NUM_STEPS, 3, [])
    assert found.num_samples == NUM_STEPS * 6
    assert found.not_covered == ["run.lock"]
    with RunReader(run) as reader:
        assert reader.totals().num_dropped > 0
        assert reader.ledger().requeued > 0


@pytest.mark.parametrize(
    "name",
    [
        *(f"{folder}/step-000002.parquet" for folder in ("batches", "dropped", "timings")),
        *("states/step-000002.state", "settings.json", "steps.jsonl", "metrics.jsonl", "train.jsonl"),
    ],
)
def test_x40_verify_names_the_file_that_is_damaged_or_gone(run: Path, name: str) -> None:
    flip(run / name)
    assert (Recounted.BYTES, name) in found_in(run)
    (run / name).unlink()
    found = verify_run(run, lints=False)
    assert (Recounted.BYTES, name) in [(each.kind, each.place) for each in found.found]
    assert found.last_good == (1 if "step-" in name else 3)


def test_x40_files_that_the_journal_does_not_know_are_findings(run: Path) -> None:
    (run / "dropped").mkdir(exist_ok=True)
    shutil.copyfile(run / "batches" / "step-000001.parquet", run / "batches" / "step-000017.parquet")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4}\n')
    assert found_in(run) == [(Recounted.BYTES, "metrics.jsonl"), (Recounted.BYTES, "batches/step-000017.parquet")]


def test_x40_a_damaged_journal_is_a_finding_and_no_run_is_an_error(run: Path, capsys) -> None:
    with closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as journal:
        journal.execute("UPDATE steps SET record_end = record_end - 1 WHERE step = 2")
    assert main(["verify", str(run)]) == 1
    assert "bytes: journal.sqlite: is damaged: the row of step 2" in capsys.readouterr().out
    assert main(["verify", str(run / "batches")]) == 2


def with_ledger(commit: StepCommit, **counts: int) -> StepCommit:
    return replace(commit, state=replace(commit.state, ledger=replace(commit.state.ledger, **counts)))


def group_of_before(commit: StepCommit) -> StepCommit:
    first, *others = commit.batch.groups
    return replace(commit, batch=replace(commit.batch, groups=(replace(first, group_index=0), *others)))


def other_reward(commit: StepCommit) -> StepCommit:
    metrics = {**commit.batch.metrics, "rollout/reward_mean": 99.0}
    return replace(commit, batch=replace(commit.batch, metrics=metrics))


def other_age(commit: StepCommit) -> StepCommit:
    metrics = {**commit.batch.metrics, "rollout/staleness_max": 7.0}
    return replace(commit, batch=replace(commit.batch, metrics=metrics))


def lost_prompt(commit: StepCommit) -> StepCommit:
    return replace(commit, state=replace(commit.state, requeued=tuple(commit.state.requeued)[1:]))


@pytest.mark.parametrize(
    ("tamper", "kind", "told"),
    [
        (lambda commit: with_ledger(commit, trained=commit.state.ledger.trained + 1), Recounted.LEDGER, "drawn"),
        (group_of_before, Recounted.LEDGER, "ends a second time"),
        (lost_prompt, Recounted.LEDGER, "the ledger has"),
        (lambda commit: replace(commit, dropped=()), Recounted.LEDGER, "0 are in the file"),
        (other_reward, Recounted.NUMBERS, "rollout/reward_mean is 99"),
        (other_age, Recounted.VERSIONS, "rollout/staleness_max is 7"),
    ],
)
async def test_what_does_not_add_up_is_found_although_its_bytes_are_as_written(
    tmp_path: Path, tamper: Tamper, kind: Recounted, told: str
) -> None:
    await make(tmp_path / "run", until=2, tamper=lambda each: tamper(each) if each.batch.step == 1 else each)
    found = verify_run(tmp_path / "run", lints=False).found
    assert any(each.kind is kind and told in each.detail and each.step == 1 for each in found), found
    assert all(each.kind is not Recounted.BYTES for each in found)


def test_files_of_earlier_versions_are_not_vouched_for_and_no_findings(run: Path, capsys) -> None:
    with closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as journal:
        journal.execute("DROP TABLE vouched")
        journal.execute("PRAGMA user_version = 2")
    assert main(["verify", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["by_kind"].values()) == {0}
    assert len([name for name in told["not_vouched"] if "/step-" in name]) >= 3 * NUM_STEPS
    assert told["num_samples"] == NUM_STEPS * 6


@pytest.mark.parametrize("step", [None, 1])
def test_a_run_of_an_earlier_version_is_taken_back(tmp_path: Path, step: int | None) -> None:
    run = Path(shutil.copytree(BEFORE, tmp_path / "run"))
    restore_run(run, step)
    with RunReader(run) as reader:
        assert (reader.step_numbers(), reader.status()) == (() if step is None else (1,), "failed")
        assert reader.vouched().steps == ({} if step is None else {1: {}})
        assert [check.name for check in file_checks(reader) if check.problem() is not None] == []


@pytest.mark.parametrize("step", [None, 0, 2])
async def test_x40_a_run_is_taken_back_and_made_again_and_nothing_is_lost(
    run: Path, made: Path, step: int | None, capsys
) -> None:
    flip(run / "states" / f"step-{3 if step is None else step + 1:06d}.state")
    if step is None:
        flip(run / "batches" / "step-000000.parquet")
    before = list(contents(run))
    with pytest.raises(RunDirectoryError, match=rf"verify {run} --restore {'start' if step is None else step}\b"):
        RunDirectory.open(run, settings=SETTINGS, identity=SETTINGS, overwrite=False, step=3)
    assert main(["verify", str(run)]) == 1
    asked = "start" if step is None else str(step)
    assert f"rollfeed verify {run} --restore {asked}" in capsys.readouterr().out
    assert main(["verify", str(run), "--restore", asked]) == 0
    assert set(before) <= set(contents(run))
    with RunReader(run) as reader:
        assert reader.step_numbers() == tuple(range(0 if step is None else step + 1))
        assert reader.status() == "failed"
    assert found_in(run) == []  # before it is gone on with, too
    await make(run)
    assert found_in(run) == []
    assert [file.read_bytes() for file in sorted((run / "batches").iterdir())] == [
        file.read_bytes() for file in sorted((made / "batches").iterdir())
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "settings.json"])
def test_x40_what_the_journal_says_as_well_is_written_anew_by_a_restore(run: Path, name: str, capsys) -> None:
    flip(run / name)
    assert main(["verify", str(run)]) == 1
    said = capsys.readouterr().out
    assert f"--restore {NUM_STEPS - 1}" in said
    assert "files of steps are damaged" not in said  # they are not, and are linted
    assert main(["verify", str(run), "--restore", str(NUM_STEPS - 1)]) == 0
    assert found_in(run) == []


def test_x40_a_run_that_failed_between_a_commit_and_its_line_of_metrics_has_no_findings(run: Path) -> None:
    restore_run(run, 2)  # which makes it a failed one
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    assert found_in(run) == []


def test_x40_a_run_is_not_taken_back_to_what_is_damaged_not_there_or_worked_on(run: Path) -> None:
    flip(run / "batches" / "step-000001.parquet")
    before = sorted(contents(run))
    with pytest.raises(RunDirectoryError, match=r"step-000001.parquet: is damaged"):
        restore_run(run, 2)
    with pytest.raises(RunDirectoryError, match="has no step 9"):
        restore_run(run, 9)
    assert [each for each in sorted(contents(run)) if len(each) > 8] == [each for each in before if len(each) > 8]
    with (
        RunDirectory.open(run, settings=SETTINGS, identity=SETTINGS, overwrite=False, step=0),
        pytest.raises(RunDirectoryError, match="is working on this run"),
    ):
        restore_run(run, 0)
    assert main(["verify", str(run), "--restore", "first"]) == 2


def test_x40_checkpoints_and_the_model_have_digests(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from rollfeed.errors import CheckpointError
    from rollfeed.training.checkpoint import TrainerState, read_state, write_state

    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    state = TrainerState(tensors={"model/weight": torch.arange(64.0)}, values={"step": 2})
    with RunDirectory.open(tmp_path / "run", settings=SETTINGS, identity=SETTINGS, overwrite=False) as directory:
        write_state(state, folder)
        (tmp_path / "run" / "model").mkdir()
        (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"weights")
        directory.finish()
    assert found_in(tmp_path / "run") == []
    files = [*folder.iterdir(), tmp_path / "run" / "model" / "model.safetensors"]
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        flip(file)
        found = {name for _, name in found_in(tmp_path / "run")}
        assert found == {str(file.relative_to(tmp_path / "run"))} or (found and file.name == "digests.json")
        if file.parent == folder:
            with pytest.raises(CheckpointError, match=r"is (damaged|missing)|cannot be read"):
                read_state(folder)
        file.write_bytes(content)
    assert torch.equal(read_state(folder).tensors["model/weight"], state.tensors["model/weight"])


def test_x40_a_damaged_checkpoint_is_set_aside_and_the_one_before_stays(run: Path) -> None:
    for step in (1, 3):
        folder = run / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.bin").write_bytes(bytes(64))
        seal_folder(folder)
    flip(run / "checkpoints" / "step-000003" / "state.bin")
    assert {name for _, name in found_in(run)} == {"checkpoints/step-000003/state.bin"}
    aside = restore_run(run, 3)
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-000001"]
    assert (aside / "checkpoints" / "step-000003" / "state.bin").exists()
    assert found_in(run) == []


async def test_x40_what_is_damaged_behind_the_step_is_cut_from_what_a_trainer_appends(tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = run / "train.jsonl"

    def train(commit: StepCommit) -> StepCommit:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f'{{"step": {step}}}\n' for step in range(commit.batch.step)[-1:])
        return commit

    await make(run, tamper=train)
    content = path.read_bytes()
    damaged = content.replace(b'"step": 3', b'"stop": 3')
    path.write_bytes(damaged)
    aside = restore_run(run, 2)
    assert path.read_bytes() == content[: content.index(b'{"step": 3')]
    assert (aside / "train.jsonl").read_bytes() == damaged
    with RunReader(run) as reader:
        assert set(reader.updates()) == {0, 1, 2}
    assert found_in(run) == []


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        before = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            listening.bind(path.name)
        finally:
            os.chdir(before)


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def make_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make_odd", [make_fifo, make_socket, make_loop, make_device])
def test_x06_what_is_no_regular_file_is_told_and_nothing_hangs(run: Path, made: Path, make_odd) -> None:
    (run / "turns.log").write_bytes(b"")
    (run / "pictures").mkdir()
    picture = run / "pictures" / f"{'0a' * 32}.png"
    picture.write_bytes(b"")
    names = [str(path.relative_to(run)) for path in sorted(run.rglob("step-*"))]
    names += ["settings.json", "steps.jsonl", "metrics.jsonl", "train.jsonl", "turns.log", f"pictures/{picture.name}"]
    for name in names:
        make_odd(run / name)
    found = {name for kind, name in found_in(run) if kind is Recounted.BYTES}
    assert set(names) <= found
    with RunReader(run) as reader:
        for read in (reader.steps, reader.updates, lambda: reader.file("batches", 1)):
            with pytest.raises(RunDirectoryError):
                read()
    with pytest.raises(RunDirectoryError, match=r"is (damaged|missing)|cannot be read"):
        RunDirectory.open(run, settings=SETTINGS, identity=SETTINGS, overwrite=False, step=2)
    make_odd(run / "journal.sqlite")
    with pytest.raises(RunDirectoryError):
        RunReader(run)


def test_x06_a_pipe_in_a_run_of_an_earlier_version_is_refused(run: Path) -> None:
    with closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as journal:
        journal.execute("DROP TABLE vouched")
        journal.execute("PRAGMA user_version = 2")
    make_fifo(run / "batches" / "step-000001.parquet")
    with RunReader(run) as reader, pytest.raises(RunDirectoryError, match="no regular file"):
        reader.summaries(1)
