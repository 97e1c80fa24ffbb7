"""TRL's trainers with rollouts of ours, in an environment with TRL: its own logprobs of them, and its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engines.servers import OFFLINE, ROOT, python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ADAPTER = """
import sys
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from rollfeed.compat.trl import rollout_func

worst = []

class Compared(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        found = super()._generate_and_score_completions(inputs)
        ids, mask = (
            torch.cat([found["prompt_" + name], found["completion_" + name]], dim=1) for name in ("ids", "mask")
        )
        with torch.no_grad():
            logps, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, found["completion_ids"].size(1))
        away = (logps - found["sampling_per_token_logps"]).abs() * found["completion_mask"]
        worst.append(float(away.max()))
        return found

trainer = Compared(
    sys.argv[1],
    reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
    args=GRPOConfig(output_dir="out", use_cpu=True, bf16=False, max_steps=3, num_generations=4, save_strategy="no",
                    per_device_train_batch_size=8, max_completion_length=16, learning_rate=0.05, report_to="none"),
    train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": str(n)}]} for n in range(8)]),
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
    rollout_func=rollout_func,
)
before = {name: each.clone() for name, each in trainer.model.named_parameters() if "base_layer" in name}
trainer.train()
assert max(worst) < 1e-3, worst
now = dict(trainer.model.named_parameters())
drift = max(float((now[name] - each).abs().max()) for name, each in before.items())
assert drift < 1e-5, drift
"""


def run(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT / "src"), "TRL_EXPERIMENTAL_SILENCE": "1"}
    return subprocess.run(
        [str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def bench(policy: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    sizes = ("--steps", "3", "--tokens", "24", "--threads", "1")
    words = ("--trl-python", python_of("trl"), "--model", policy, *sizes, *options, "--output", out)
    ended = run(sys.executable, ROOT / "bench" / "trl_rollouts.py", *words, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    (found,) = json.loads(out.read_text())["models"]
    return dict(found)


def test_the_trainers_logprobs_of_our_samples_are_ours(policy: Path, tmp_path: Path) -> None:
    found = bench(policy, tmp_path)
    assert found["logprob_difference"] < 1e-3
    assert [len(found["runs"][side]["steps"]) for side in ("trl", "rollfeed")] == [3, 3]


def test_the_asynchronous_trainer_makes_its_steps(policy: Path, tmp_path: Path) -> None:
    found = bench(policy, tmp_path, "--asynchronous")
    assert len(found["runs"]["asynchronous"]["steps"]) == 3


def test_an_adapter_is_merged_and_left_as_it_was(policy: Path, tmp_path: Path) -> None:
    ended = run(python_of("trl"), "-W", "ignore", "-c", ADAPTER, policy, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_the_example_trains(policy: Path, tmp_path: Path) -> None:
    ended = run(python_of("trl"), "-W", "ignore", ROOT / "examples" / "trl" / "train.py", policy, "2", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "rewards/is_short/mean" in ended.stdout
