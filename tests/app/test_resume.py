"""A run that stops and goes on is the run that never stopped."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollfeed import app
from rollfeed.config import RolloutConfig, RolloutMode, RunSpec, Settings, validate_settings
from rollfeed.errors import ConfigError, RunDirectoryError
from rollfeed.prompts import ChatRenderer, ColumnKeys, DatasetSource, MixtureSource, load_prompts
from rollfeed.store import RunDirectory, RunReader
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.types import Prompt, Sample

NUM_PROMPTS, BATCH, NUM_STEPS = 10, 3, 12


async def digit(sample: Sample, prompt: Prompt) -> float:
    del prompt
    return float(sample.response)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"question {number}", "answer": str(number)} for number in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shuffled(data: Path) -> MixtureSource:
    loaded = load_prompts(
        str(data),
        name="questions",
        renderer=ChatRenderer(CharTokenizer(), rollout_max_prompt_len=None),
        keys=ColumnKeys(input_key="question", label_key="answer"),
    )
    source = DatasetSource(loaded, rollout_shuffle=True, seed=7)
    return MixtureSource([(source.name, 1.0, source)], seed=7)


@pytest.fixture
def go_on(data: Path) -> Callable[..., Any]:
    """Make steps with fresh objects, as a new process does; return the first step that was made."""

    async def make(
        out: Path, *, until: int, step: int | None = None, order: int = 0, mode: RolloutMode = RolloutMode.SYNC
    ) -> int:
        config = RolloutConfig(
            rollout={
                "mode": mode,
                "rollout_batch_size": BATCH,
                "n_samples_per_prompt": 2,
                "over_sampling_batch_size": 5,
                "deterministic": True,
            },
            plugins={"reward": digit},
        )
        with RunDirectory.open(out, settings={}, identity={}, overwrite=False, step=step) as directory:
            rollouts = app.open_rollouts(
                config,
                source=shuffled(data),
                engine=ScriptedEngine(random_order=order),
                tokenizer=CharTokenizer(),
                state=directory.state,
                commit=partial(directory.commit, reward_key=None),
            )
            first = rollouts.next_step
            async with rollouts:
                while rollouts.next_step < until:
                    await rollouts.generate_batch()
            assert rollouts.ledger.balanced
        return first

    return make


def trained(out: Path) -> list[str]:
    with RunReader(out) as run:
        batches = [run.batch(record.step) for record in run.steps()]
    return [group.prompt.prompt_id for batch in batches for group in batch.groups]


async def test_r42_a_run_stopped_after_every_step_trains_the_prompts_of_an_unbroken_one(tmp_path: Path, go_on) -> None:
    await go_on(tmp_path / "unbroken", until=NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        assert await go_on(tmp_path / "stopped", until=step, order=step) == step - 1
    unbroken = trained(tmp_path / "unbroken")
    assert trained(tmp_path / "stopped") == unbroken
    assert len(unbroken) == len(set(unbroken)) == BATCH * NUM_STEPS
    first, second = ([name.partition("@")[0] for name in unbroken[start : start + 10]] for start in (0, 10))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("step", [0, 2, 3, 9, 11])
async def test_r42_a_run_that_goes_back_trains_the_prompts_of_an_unbroken_one(tmp_path: Path, go_on, step: int) -> None:
    await go_on(tmp_path / "unbroken", until=NUM_STEPS)
    shutil.copytree(tmp_path / "unbroken", tmp_path / "back")
    assert await go_on(tmp_path / "back", until=NUM_STEPS, step=step, order=3) == step + 1
    assert trained(tmp_path / "back") == trained(tmp_path / "unbroken")
    for path in sorted((tmp_path / "unbroken" / "batches").iterdir()):
        assert (tmp_path / "back" / "batches" / path.name).read_bytes() == path.read_bytes()


def leave_half_a_step(out: Path, *, like: int, step: int) -> None:
    """Leave what a process leaves that is killed just before its commit."""
    for folder, suffix in (("batches", "parquet"), ("timings", "parquet"), ("states", "state")):
        shutil.copy(out / folder / f"step-{like:06d}.{suffix}", out / folder / f"step-{step:06d}.{suffix}")
    with (out / "steps.jsonl").open("a") as file:
        file.write('{"step": 11}\n')


async def test_r43_the_latest_step_is_the_last_by_number_that_is_complete(tmp_path: Path, go_on) -> None:
    await go_on(tmp_path / "unbroken", until=NUM_STEPS)
    out = tmp_path / "run"
    await go_on(out, until=11)
    leave_half_a_step(out, like=10, step=11)
    assert await go_on(out, until=NUM_STEPS) == 11
    assert trained(out) == trained(tmp_path / "unbroken")


async def test_r43_a_given_step_wins_over_the_latest(tmp_path: Path, go_on) -> None:
    out = tmp_path / "run"
    await go_on(out, until=11)
    leave_half_a_step(out, like=10, step=11)
    before = trained(out)
    for step in (9, 0):
        assert await go_on(out, until=11, step=step) == step + 1
        assert trained(out) == before
    with pytest.raises(RunDirectoryError, match="has no step 11 to go back to; it has steps 0 to 10"):
        await go_on(out, until=NUM_STEPS, step=11)


async def test_resume_needs_the_directory_only(tiny_checkpoint: Path, tmp_path: Path, data: Path) -> None:
    settings = app_settings(tiny_checkpoint, data)
    out = tmp_path / "run"
    await app.run(app.prepare(RunSpec(settings, (tmp_path,))), out=out)
    stored = app.stored_spec(out)
    assert (stored.settings, stored.folders) == (settings, (tmp_path, Path.cwd()))
    threads = app.stored_spec(out, ["engine.threads=2", "rollout.over_sampling_factor=2.0"]).settings
    assert (threads.engine.threads, threads.rollout.over_sampling_factor) == (2, 2.0)
    before = trained(out)
    summary = await resume(out, "rollout.num_rollout=3", step=0)
    assert (summary.num_resumed_steps, summary.num_steps) == (1, 3)
    assert trained(out)[: len(before)] == before


async def test_a_run_of_before_goes_on_though_its_failure_budget_was_a_count(
    tiny_checkpoint: Path, tmp_path: Path, data: Path
) -> None:
    out = tmp_path / "run"
    await app.run(app.prepare(RunSpec(app_settings(tiny_checkpoint, data), (tmp_path,))), out=out)
    with closing(sqlite3.connect(out / "journal.sqlite", isolation_level=None)) as journal:
        ((settings, identity),) = journal.execute("SELECT settings, identity FROM run").fetchall()
        tree = json.loads(settings)
        tree["rollout"]["failure_budget"] = 16
        for name in ("failure_window", "failure_minimum"):
            del tree["rollout"][name]
        known = json.dumps({**json.loads(identity), "rollout.failure_budget": 16, "rollout.group_failure": "drop"})
        journal.execute("UPDATE run SET settings = ?, identity = ?", (json.dumps(tree), known))
        journal.execute("DROP TABLE vouched")
        journal.execute("PRAGMA user_version = 2")
    summary = await resume(out, "rollout.num_rollout=3", "rollout.group_failure='refill'", step=1)
    assert (summary.num_resumed_steps, summary.num_steps) == (2, 3)


async def test_resume_refuses_what_decides_what_a_run_is(tiny_checkpoint: Path, tmp_path: Path, data: Path) -> None:
    out = tmp_path / "run"
    await app.run(app.prepare(RunSpec(app_settings(tiny_checkpoint, data), (tmp_path,))), out=out)
    with pytest.raises(RunDirectoryError, match="a finished run with other settings: seed = 3 there, 4 here"):
        await resume(out, "seed=4", step=0)
    with pytest.raises(RunDirectoryError, match="holds a finished run"):
        await resume(out)
    with pytest.raises(ConfigError, match=rf"settings of {out}: rollout\.num_rolout: unknown setting"):
        await resume(out, "rollout.num_rolout=4")


async def resume(out: Path, *overrides: str, step: int | None = None) -> app.RunSummary:
    return await app.run(app.prepare(app.stored_spec(out, overrides), out=out), out=out, step=step)


def app_settings(checkpoint: Path, data: Path) -> Settings:
    return validate_settings(
        {
            "seed": 3,
            "model": {"checkpoint": str(checkpoint)},
            "prompts": {"datasets": [{"path": data.name, "input_key": "question", "label_key": "answer"}]},
            "rollout": {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "deterministic": True},
            "sampling": {"rollout_max_response_len": 4},
            "engine": {"threads": 1, "num_slots": 4, "context_length": 256},
            "reward": {"rm_type": "exact"},
        },
        where="test",
    )
