"""A tracker of one's own is told of every step, update and evaluation of a run, a training and an evaluation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

TRACKER = """
import json
from pathlib import Path

class Told:
    def start(self, run):
        self.lines = run.folder.parents[1] / "told.jsonl"
        self.say(began=run.first_step, settings=run.settings, going_on=run.going_on, went_back=run.went_back)
        return "its id"

    def log(self, metrics, *, step):
        kind, is_stored = next(iter(metrics)).partition("/")[0], (self.lines.parent / "eval.json").exists()
        self.say(step=step, kind=kind, reward=metrics.get("rollout/reward_mean"), is_stored=is_stored)

    def log_samples(self, rows, *, step, name):
        self.say(step=step, kind=name, rows=rows)

    def close(self):
        self.say(closed=True)

    def say(self, **values):
        with self.lines.open("a") as file:
            print(json.dumps(values), file=file)
"""
SETTINGS = """
[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = 3
rollout_batch_size = 2
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 4

[engine]
threads = 1
num_slots = 8
context_length = 256

[tracking]
num_samples = 2
samples_interval = 2

[plugins]
tracker = "told:Told"
"""
TRAIN = """
[train]
eval_interval = 2

[[eval.environments]]
id = "core/copy_text"
num_prompts = 2
"""


@pytest.fixture
def settings(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    (tmp_path / "told.py").write_text(TRACKER)
    (tmp_path / "run.toml").write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
    return tmp_path / "run.toml"


def told(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "told.jsonl").read_text().splitlines()]


def kinds(records: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(each["step"], each["kind"]) for each in records if "step" in each]


def test_a_run_and_what_goes_on_with_it_are_told_of(rollfeed, settings: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert rollfeed("run", settings, "--out", out).code == 0
    first, *records, last = told(out)
    assert (first["began"], first["going_on"], first["settings"]["rollout.num_rollout"]) == (0, None, 3)
    assert kinds(records) == [(0, "samples"), (0, "rollout"), (1, "rollout"), (2, "samples"), (2, "rollout")]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [each["reward"] for each in records if each["kind"] == "rollout"] == [
        line["rollout/reward_mean"] for line in lines
    ]
    assert len(records[0]["rows"]) == 2
    assert records[0]["rows"][0]["prompt"]
    assert last == {"closed": True}

    assert rollfeed("run", "--resume", out, "--step", "1", "--set", "tracking.num_samples=0").code == 0
    again = told(out)[len(records) + 2 :]
    assert (again[0]["began"], again[0]["going_on"], again[0]["went_back"]) == (2, "its id", True)
    assert kinds(again) == [(2, "rollout")]


def test_a_run_that_replaces_another_is_a_new_one_to_trackers(rollfeed, settings: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert rollfeed("run", settings, "--out", out, "--set", "rollout.num_rollout=1").code == 0
    assert rollfeed("run", settings, "--out", out, "--overwrite", "--set", "rollout.num_rollout=1").code == 0
    assert [each["going_on"] for each in told(out) if "began" in each] == [None, None]


def test_a_training_and_an_evaluation_are_told_of(rollfeed, settings: Path, tmp_path: Path) -> None:
    settings.write_text(settings.read_text() + TRAIN)
    out, samples = tmp_path / "out", "eval/core/copy_text@0/samples"
    assert rollfeed("train", settings, "--out", out, "--set", "rollout.num_rollout=2").code == 0
    assert kinds(told(out)) == [
        *[(0, "eval"), (0, samples), (0, "samples"), (0, "rollout"), (0, "train")],
        *[(1, "rollout"), (1, "train"), (2, "eval"), (2, samples)],
    ]
    out = tmp_path / "evaluated"
    for _ in range(2):
        assert rollfeed("eval", settings, "--out", out, "--overwrite").code == 0
        assert kinds(told(out)) == [(0, "eval"), (0, samples)]
        assert [each["is_stored"] for each in told(out) if "is_stored" in each] == [True]  # whatever the tracker does
        (out / "told.jsonl").unlink()


def test_what_is_not_installed_is_said_before_anything_starts(
    rollfeed, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for command in ("check", "run", "eval"):
        settings.write_text(settings.read_text() + (TRAIN if command == "eval" else ""))
        result = rollfeed(command, settings, "--set", 'tracking.trackers=["wandb"]')
        assert (result.code, result.out) == (2, "")
        assert result.err.strip() == (
            "rollfeed: tracking.trackers: wandb is not installed: pip install 'rollfeed[wandb]', or leave it out"
        )
