"""A training that was killed goes on with other settings: freely, on purpose, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REWARD = """
import os
from pathlib import Path

HERE = Path(__file__).parent

async def spread(sample, prompt):
    versions = {span.policy_version for span in sample.version_spans}
    if 3 in versions and (HERE / "die").exists():
        (HERE / "die").unlink()
        os._exit(9)
    return float(sample.response_token_ids.sum() % 7)
"""
SETTINGS = """
seed = 5

[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = 5
rollout_batch_size = 2
n_samples_per_prompt = 4

[sampling]
rollout_max_response_len = 8

[engine]
threads = 1
num_slots = 8
context_length = 256

[train]
checkpoint_interval = 2
micro_batch_tokens = 300
share_prompts = true
activation_checkpointing = false
device = "auto"
threads = 1

[train.optimizer]
learning_rate = 1e-3

[reward]
override_environments = true

[plugins]
reward = "dying_reward:spread"

[eval]
n_samples_per_prompt = 1
num_prompts = 2

[[eval.environments]]
id = "core/copy_text"
"""
RATE = "learning_rate = 1e-3"


@pytest.fixture(scope="module")
def killed_run(
    fork_rollfeed: Callable[..., Any], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The folder of a settings file and of `run`, whose process died in batch 3 of 5; its checkpoint is that of 1."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "dying_reward.py").write_text(REWARD)
    (folder / "die").touch()
    (folder / "train.toml").write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
    training = fork_rollfeed("train", folder / "train.toml", "--out", folder / "run")
    assert training.wait() == 9, training.read()
    training.close()
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-000001"]
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(killed_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run, tmp_path / "training"))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "train.toml").read_text()
    assert old in text
    (folder / "train.toml").write_text(text.replace(old, new))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("checkpoint_interval = 2", "checkpoint_interval = 3"),
        ("checkpoint_interval = 2", "checkpoint_interval = 2\neval_interval = 1"),
        ('device = "auto"', 'device = "cpu"'),
        ("share_prompts = true", "share_prompts = false"),
        ("micro_batch_tokens = 300", "micro_batch_tokens = 290"),
        ("activation_checkpointing = false", "activation_checkpointing = true"),
        ("threads = 1\n\n[train.optimizer]", "threads = 2\non_non_finite = 'skip'\n\n[train.optimizer]"),
    ],
)
def test_a_killed_training_goes_on_with_how_it_is_computed_and_watched(rollfeed, folder: Path, old, new) -> None:
    edit(folder, old, new)
    result = rollfeed("train", folder / "train.toml", "--out", folder / "run")
    assert result.code == 0, result.err
    assert f"goes on at step 2 from {folder}/run/checkpoints/step-000001" in result.out
    assert [record["step"] for record in records(folder / "run" / "train.jsonl")] == [0, 1, 2, 3, 4]
    if "checkpoint_interval = 3" in new:
        assert checkpoints(folder) == ["step-000002", "step-000004"]
    if "eval_interval" in new:
        assert [record["step"] for record in records(folder / "run" / "eval.jsonl")] == [0, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("old", "new", "key", "remedy"),
    [
        (
            RATE,
            "learning_rate = 2e-3",
            "train.optimizer.learning_rate = 0.001 there, 0.002 here",
            "learning_rate=0.002",
        ),
        (
            RATE,
            f"{RATE}\n[train.loss]\ncorrection_high = 3.0",
            "train.loss.correction_high = 2.0 there, 3.0 here",
            "_high=3.0",
        ),
    ],
)
def test_what_an_edited_file_changes_of_learning_is_refused_with_how_to_do_it_on_purpose(
    rollfeed, folder: Path, old: str, new: str, key: str, remedy: str
) -> None:
    edit(folder, old, new)
    for command in ("check", "train"):
        result = rollfeed(command, folder / "train.toml", "--out", folder / "run")
        assert result.code == 2
        assert f"holds an unfinished run with other settings: {key}; set it back, or change it on purpose" in result.err
        assert f"{remedy}\n" in result.err
    assert len(records(folder / "run" / "train.jsonl")) == 3


def test_what_is_changed_on_purpose_is_taken_kept_and_shown(rollfeed, start_rollfeed, folder: Path) -> None:
    run, file = folder / "run", folder / "train.toml"
    options = ("--set", "train.optimizer.learning_rate=2e-3", "--set", "train.loss.correction_high=3.0")
    assert rollfeed("check", file, "--out", run, *options).code == 0
    (folder / "die").touch()
    process = start_rollfeed("train", file, "--out", run, *options)
    output = process.read()
    assert process.wait() == 9, output
    told = "from step 2: train.optimizer.learning_rate = 0.002, 0.001 before"
    assert f"{run}: {told}" in output
    # Killed before a checkpoint was written: what was made with it is made again, with what is asked for now.
    refused = rollfeed("train", file, "--out", run)
    assert refused.code == 2
    assert "train.optimizer.learning_rate = 0.002 there, 0.001 here" in refused.err
    assert rollfeed("train", file, "--out", run, *options).code == 0
    rates = [record["train/learning_rate"] for record in records(run / "train.jsonl")]
    assert rates == [1e-3, 1e-3, 2e-3, 2e-3, 2e-3]
    shown = rollfeed("show", run)
    assert f"changed {told}" in shown.out.replace("\n", " ")
    assert rollfeed("show", run, "--json").json["run"]["changes"] == [
        {"step": 2, "key": "train.loss.correction_high", "old": 2.0, "new": 3.0},
        {"step": 2, "key": "train.optimizer.learning_rate", "old": 1e-3, "new": 2e-3},
    ]


def test_what_is_set_on_purpose_and_fixed_is_refused_with_its_reason(rollfeed, folder: Path) -> None:
    result = rollfeed("train", folder / "train.toml", "--out", folder / "run", "--set", "seed=6")
    assert result.code == 2
    assert "seed = 5 there, 6 here; choose another --out" in result.err
    assert "(seed decides all that is random)" in result.err
