"""A run with divergence in its rewards and a reference that follows: what it stores; a kill changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from rollfeed.batch import batch_advantages
from rollfeed.config.advantage import AdvantageEstimator, AdvantageSettings
from rollfeed.store import RunReader
from rollfeed.store.json_text import read_records
from rollfeed.store.layout import CHECKPOINTS, TRAIN_LOG

REWARD = """
import os, signal
from pathlib import Path

when = Path(__file__).with_name("kill_when")

def score(sample, prompt):
    if when.exists() and Path(when.read_text()).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sample.response_token_ids.sum() % 7)
"""
SETTINGS = """
seed = 3
model.checkpoint = "{checkpoint}"
engine = {{context_length = 256, kernels = "torch", precision = "fp32"}}
prompts.environments = [{{id = "core/copy_text", apply_chat_template = false}}]
rollout = {{num_rollout = 6, rollout_batch_size = 3, n_samples_per_prompt = 2, deterministic = true}}
sampling.rollout_max_response_len = 8
reward = {{override_environments = true, functions_in_workers = false}}
plugins.reward = "reward_kl_reward:score"
advantage.estimator = "reinforce_pp"

[train]
checkpoint_interval = 2
threads = 1
optimizer.learning_rate = 0.01
loss = {{reward_kl_coefficient = 0.5, reference_refresh_interval = 3, reference_mixup_alpha = 0.5}}
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    (tmp_path / "reward_kl_reward.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
    return tmp_path


def records_of(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key != "seconds"} for each in read_records(out / TRAIN_LOG)]


@pytest.mark.soak
def test_a_killed_training_ends_with_the_same_weights(folder: Path, start_rollfeed: Callable[..., Any]) -> None:
    outs = whole, parts = folder / "whole", folder / "parts"
    commands = [("train", folder / "run.toml", "--out", out) for out in outs]
    assert start_rollfeed(*commands[0]).wait() == 0
    (folder / "kill_when").write_text(str(parts / "batches" / "step-000004.parquet"))  # behind a refresh
    assert start_rollfeed(*commands[1]).wait() == -signal.SIGKILL
    assert sorted(path.name for path in (parts / CHECKPOINTS).iterdir()) == ["step-000001", "step-000003"]
    (folder / "kill_when").unlink()
    assert start_rollfeed(*commands[1]).wait() == 0
    assert records_of(parts) == records_of(whole)
    for name in ("model/model.safetensors", f"{CHECKPOINTS}/step-000005/trainer.safetensors"):
        ours, theirs = (load_file(out / name) for out in outs)
        assert ours.keys() == theirs.keys()
        assert [each for each in ours if (ours[each] != theirs[each]).any()] == []
    assert any(name.startswith("reference/") for name in ours)
    found = [record["train/reward_kl"] for record in records_of(whole)]
    assert found[0] == 0.0
    assert all(abs(each) > 1e-6 for each in found[1:])
    # What is stored are the advantages of the rewards alone.
    with RunReader(whole) as reader:
        batch = reader.batch(4)
    settings = AdvantageSettings(estimator=AdvantageEstimator.REINFORCE_PP)
    assert list(batch.advantages_S) == list(batch_advantages(batch.groups, settings=settings))
