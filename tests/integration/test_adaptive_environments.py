"""Runs whose environments adapt: stopped and gone on with, with other environments, and with another policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.environments.registry import named_by_path
from rollfeed.store import RunReader

SETTINGS = """
seed = 5

[model]
checkpoint = "{checkpoint}"

[prompts.adaptive]
environment_list = ["core/copy_text", "core/compare_max"]
initial_difficulty = 2

[rollout]
num_rollout = {num_rollout}
rollout_batch_size = 4
n_samples_per_prompt = 4
deterministic = true

[sampling]
rollout_max_response_len = 4

[engine]
threads = 1
num_slots = 8
context_length = 384

[reward]
override_environments = true

[plugins]
reward = "rewards.py:score"
"""
REWARD = """
from rollfeed.types import Verdict

async def score(sample, prompt):
    return Verdict.graded(prompt.metadata["environment"] == "core/copy_text" or sample.index % 4 == 0)
"""


@pytest.fixture
def write(tmp_path: Path, tiny_checkpoint: Path) -> Callable[..., Path]:
    def write(num_rollout: int) -> Path:
        (tmp_path / "rewards.py").write_text(REWARD)
        path = tmp_path / f"run{num_rollout}.toml"
        path.write_text(SETTINGS.format(checkpoint=tiny_checkpoint, num_rollout=num_rollout))
        return path

    return write


def state(out: Path, step: int) -> dict[str, Any]:
    with RunReader(out) as run:
        found: dict[str, Any] = run.state(step).source["sources"]["adaptive"]
    return found


def prompt_ids(out: Path) -> list[str]:
    with RunReader(out) as run:
        return [group.prompt.prompt_id for step in run.steps() for group in run.batch(step.step).groups]


def test_a_run_that_stops_and_goes_on_is_the_unbroken_one(rollfeed: Any, write: Any, tmp_path: Path) -> None:
    assert rollfeed("run", write(6), "--out", tmp_path / "whole").code == 0
    out = tmp_path / "parts"
    assert rollfeed("run", write(4), "--out", out).code == 0
    ran = rollfeed("run", "--resume", out, "--step", "1", "--set", "rollout.num_rollout=6")
    assert ran.code == 0, ran.err
    assert prompt_ids(tmp_path / "parts") == prompt_ids(tmp_path / "whole")
    assert state(tmp_path / "parts", 5) == state(tmp_path / "whole", 5)
    level = state(tmp_path / "whole", 5)["environments"]["core/copy_text"]["difficulty"]["policy"]["level"]
    assert level > 2
    metrics = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    told = [each["RLVE/core/copy_text/difficulty"] for each in metrics if "RLVE/core/copy_text/difficulty" in each]
    assert told == [float(each) for each in range(3, level + 1)]
    assert metrics[-1]["rollout/problem_generation_seed"] >= 24


def test_environments_and_policy_change_on_purpose_only(rollfeed: Any, write: Any, tmp_path: Path) -> None:
    out, chosen = tmp_path / "run", '["core/copy_text", "core/sort_numbers"]'
    assert rollfeed("run", write(2), "--out", out).code == 0
    before = state(out, 1)["environments"]
    words = (f"prompts.adaptive.environment_list={chosen}", "prompts.adaptive.policy=rlve", "rollout.num_rollout=4")
    ran = rollfeed("run", "--resume", out, "--step", "1", *(word for each in words for word in ("--set", each)))
    assert ran.code == 0, ran.err
    after = state(out, 3)["environments"]
    assert after["core/compare_max"] == before["core/compare_max"]
    level_before, level_after = (each["core/copy_text"]["difficulty"]["policy"]["level"] for each in (before, after))
    assert level_after >= level_before >= 2
    assert after["core/sort_numbers"]["difficulty"]["policy"]["level"] == 2


def test_check_names_an_environment_and_a_level_that_are_not_there(rollfeed: Any, write: Any) -> None:
    changed = rollfeed("check", write(2), "--set", "prompts.adaptive.initial_difficulty=25")
    assert changed.code == 2
    assert "environment core/copy_text: level = 25: its levels are 0 to 20" in changed.err
    changed = rollfeed("check", write(2), "--set", 'prompts.adaptive.environment_list=["core/copytext"]')
    assert changed.code == 2
    assert "core/copy_text" in changed.err


def test_check_names_environments_whose_problems_cannot_be_made(rollfeed: Any, write: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    chosen = 'prompts.adaptive.environment_list=["mine.py:Raises", "core/copy_text", "mine.py:{}"]'
    raises, raises_too = refused(rollfeed, write(2), chosen.format("RaisesToo"))
    for name, line in (("my/Raises", raises), ("my/RaisesToo", raises_too)):
        assert f"{name}@2: 5 problems in a row cannot be used (problem 4: OSError: no dice" in line
    # With little time others may be named beside it: on a busy machine they are not made in time either.
    *_, hangs = refused(rollfeed, write(2), chosen.format("Hangs"), "prompts.make_timeout_seconds=0.2")
    assert "my/Hangs@2: its first problems cannot be made in time (no result within 0.2 s" in hangs
    assert hangs.endswith("or take it out of environment_list")


def refused(rollfeed: Any, settings: Path, *changes: str) -> list[str]:
    checked = rollfeed("check", settings, *(word for each in changes for word in ("--set", each)))
    named_by_path.clear()
    assert checked.code == 2
    lines: list[str] = checked.err.splitlines()
    return lines


FAILING = """
import time


class Raises:
    environment_id, version, summary, max_level = "my/Raises", 1, "cannot be made", None

    def make(self, level, random):
        raise OSError("no dice")

    def verify(self, params, response): ...


class RaisesToo(Raises):
    environment_id = "my/RaisesToo"


class Hangs(Raises):
    environment_id = "my/Hangs"

    def make(self, level, random):
        time.sleep(3600)
"""
