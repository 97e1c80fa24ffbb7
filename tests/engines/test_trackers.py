"""W&B, TensorBoard, MLflow and Trackio, without a network: their own readers find what was logged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.servers import OFFLINE, ROOT, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SETTINGS = """
[model]
checkpoint = "{policy}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = 3
rollout_batch_size = 2
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 8

[engine]
context_length = 512

[tracking]
trackers = ["tensorboard", "wandb", "mlflow", "trackio"]
group = "seeds"
samples_interval = 2
"""
TRAIN = """
[train]
checkpoint_interval = 1
eval_interval = 1

[[eval.environments]]
id = "core/copy_text"
num_prompts = 2
"""
TRACKERS = ["tensorboard", "wandb", "mlflow", "trackio"]
REWARD = "rollout/reward_mean"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(policy: Path, tmp_path: Path) -> Command:
    """Run a command of rollfeed where the trackers are; keyword arguments are variables of its environment."""
    python = python_of("trackers")
    (tmp_path / "run.toml").write_text(SETTINGS.format(policy=policy))
    own = {"PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}", "WANDB_ERROR_REPORTING": "false"}
    told = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}

    def run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *map(str, words)],
            cwd=tmp_path,
            env={**told, **OFFLINE, **own, **store, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def rollfeed(command: Command, *words: str | Path, **variables: str) -> str:
    done = command("-m", "rollfeed", *words, **variables)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)  # nothing that trackers print is among it
    return done.stderr


def read(command: Command, out: Path) -> dict[str, list[dict[str, Any]]]:
    done = command(ROOT / "tests" / "engines" / "read_trackers.py", out)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def test_a_training_is_found_by_the_readers_of_all_trackers(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text() + TRAIN)
    out = tmp_path / "first"
    said = rollfeed(command, "train", "run.toml", "--out", out, "--json")
    assert "there is no key" in said
    assert "are not in it" not in said
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    for name, (found,) in read(command, out).items():
        assert found["name"] == "first"
        points = found["points"]
        for metric, logged in ((REWARD, metrics), ("perf/step_seconds", metrics), ("train/entropy", trained)):
            assert [step for step, _ in points[metric]] == [0, 1, 2], name
            assert [value for _, value in points[metric]] == pytest.approx([line[metric] for line in logged]), name
        at_k = "eval/core/copy_text_at_0/pass_at_1" if name == "mlflow" else "eval/core/copy_text@0/pass@1"
        assert [step for step, _ in points[at_k]] == [0, 1, 2, 3], name
        assert found["samples"]["samples"] == [0, 2], name
        assert found.get("group") == (None if name == "tensorboard" else "seeds")
        settings = found["settings"]
        assert "rollout.rollout_batch_size" in settings
        assert name == "tensorboard" or str(settings["rollout.rollout_batch_size"]) == "2"

    shutil.rmtree(out / "checkpoints" / "step-000002")  # as if it had been killed before that was written
    rollfeed(command, "train", "run.toml", "--out", out, "--set", "rollout.num_rollout=4", "--json")
    (found,) = read(command, out)["tensorboard"]
    for metric, num_steps in ((REWARD, 4), ("train/entropy", 4), ("eval/core/copy_text@0/pass@1", 5)):
        assert [step for step, _ in found["points"][metric]] == list(range(num_steps)), metric


def test_a_run_that_goes_on_has_no_step_twice(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "first"
    rollfeed(command, "run", "run.toml", "--out", out, "--json", WANDB_MODE="offline")
    rollfeed(command, "run", "--resume", out, "--step", "2", "--set", "rollout.num_rollout=4", "--json")
    again = read(command, out)
    for name in TRACKERS:
        points = [point for run in again[name] for point in run["points"][REWARD]]
        assert [step for step, _ in points] == [0, 1, 2, 3], name
    assert again["wandb"][0]["id"] == again["wandb"][1]["id"]  # one run to W&B, in a file a process
    assert len(again["mlflow"]) == len(again["trackio"]) == 1
    assert again["mlflow"][0]["status"] == "FINISHED"

    rollfeed(command, "run", "--resume", out, "--step", "0", "--json")
    back = read(command, out)
    assert [step for step, _ in back["tensorboard"][0]["points"][REWARD]] == [0, 1, 2, 3]
    for name in ("wandb", "mlflow", "trackio"):
        assert back[name][-1]["name"] == "first-from-1", name
        assert [step for step, _ in back[name][-1]["points"][REWARD]] == [1, 2, 3], name


def test_trackers_that_cannot_be_reached_or_written_end_no_run(command: Command, tmp_path: Path) -> None:
    out, nowhere = tmp_path / "first", tmp_path / "nowhere"
    nowhere.write_text("no folder")
    said = rollfeed(
        command,
        *("run", "run.toml", "--out", out, "--json"),
        WANDB_BASE_URL="http://127.0.0.1:9",
        WANDB_API_KEY="0f1e2d3c4b" * 4,
        MLFLOW_TRACKING_URI="http://127.0.0.1:9",
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="1",
        TRACKIO_DIR=str(nowhere / "trackio"),
    )
    assert "tracker mlflow: 5 of 5 records are not in it" in said
    assert "send it with `wandb sync`" in said
    assert "0f1e2d3c4b" not in said + (out / "settings.json").read_text()
    assert len(list(out.glob("trackers/wandb/offline-run-*/run-*.wandb"))) == 1
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
