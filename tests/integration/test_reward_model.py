"""The reward model of examples/reward_model: trained, gone on with after a kill, and used."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app.rewards import open_reward_hub
from rollfeed.cli.main import main
from rollfeed.config import RewardSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_model"
KILLS = """
import os, signal
from pathlib import Path

when = Path(__file__).with_name("kill_when")

def kill(sample, prompt):
    if when.exists() and Path(when.read_text()).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.toml", "run.toml", "write_pairs.py"):
        shutil.copyfile(EXAMPLE / name, tmp_path / name)
    write_pairs(tmp_path, seed=0)
    (tmp_path / "kills.py").write_text(KILLS)
    return tmp_path


def write_pairs(folder: Path, *, seed: int) -> None:
    subprocess.run([sys.executable, str(folder / "write_pairs.py"), str(folder), str(seed)], check=True)


def command(folder: Path, out: str, *overrides: str) -> list[str]:
    words = [word for each in (*overrides, "plugins.sample_hook=kills:kill") for word in ("--set", each)]
    return ["train", str(folder / "train.toml"), "--out", str(folder / out), *words]


def train(folder: Path, out: str, *overrides: str) -> list[dict[str, Any]]:
    assert main(command(folder, out, *overrides)) == 0
    lines = (folder / out / "train.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


async def held_out_accuracy(folder: Path, model: Path) -> float:
    """Share of held-out pairs that the trained model orders rightly, scored as answers of a run are."""
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    about = {"checkpoint": str(model), "device": "cpu"}
    async with open_reward_hub(RewardSettings(rm_type="reward_model", model=about)) as hub:
        ahead = []
        for row in rows:
            chosen, rejected = [
                (await hub.grade(row[name], None, prompt=row["prompt"])).reward for name in ("chosen", "rejected")
            ]
            ahead.append(chosen > rejected)
    return sum(ahead) / len(ahead)


def test_a_training_that_is_killed_ends_as_the_unbroken_one_and_its_model_scores_a_run(
    folder: Path, start_rollfeed: Callable[..., Any]
) -> None:
    small = ("rollout.rollout_batch_size=8", "train.checkpoint_interval=2", "rollout.num_rollout=4")
    whole = train(folder, "whole", *small)
    assert whole[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)  # all scores are 0 at first
    assert whole[0]["train/pair_accuracy"] == 0.5
    assert whole[-1]["train/score_margin"] != 0.0
    (folder / "kill_when").write_text(str(folder / "parts" / "batches" / "step-000002.parquet"))  # behind a checkpoint
    assert start_rollfeed(*command(folder, "parts", *small)).wait() == -signal.SIGKILL
    assert not (folder / "parts" / "model").exists()
    (folder / "kill_when").unlink()
    assert train(folder, "parts", *small) == whole
    for name in ("model.safetensors", "config.json"):
        assert (folder / "parts" / "model" / name).read_bytes() == (folder / "whole" / "model" / name).read_bytes()
    out = folder / "scored"
    model = f"reward.model.checkpoint={folder / 'whole' / 'model'}"
    assert main(["run", str(folder / "run.toml"), "--out", str(out), "--set", model]) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert all(step["rollout/reward_std"] > 0 and step["rollout/reward_error"] == 0 for step in steps)
    assert all("rollout/correct_ratio" in step for step in steps)
    assert main(["lint", str(folder / "whole")]) == 0


@pytest.mark.soak
async def test_held_out_pairs_are_ordered_rightly(folder: Path) -> None:
    write_pairs(folder, seed=1)
    trained = train(folder, "rm", "seed=1")
    assert trained[-1]["train/pair_accuracy"] >= 0.9
    assert await held_out_accuracy(folder, folder / "rm" / "model") >= 0.9


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"chosen": None}, "an answer is a text"),
        ({"rejected": "cba", "chosen": "cba"}, "the same answer"),
        ({"chosen": [{"role": "assistant", "content": "a"}]}, "need the chat template"),
    ],
)
def test_pairs_that_teach_nothing_are_refused(
    folder: Path, change: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "rv:abc=", "chosen": "cba", "rejected": "cbb", **change}
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["check", str(folder / "train.toml")]) != 0
    assert told in capsys.readouterr().err
