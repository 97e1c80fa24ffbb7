"""A run is built from its ``RunSpec`` alone, once, in whatever process."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollfeed import app
from rollfeed.config import PluginSettings, RunSpec, Settings, validate_settings
from rollfeed.errors import ConfigError
from rollfeed.store import RunReader
from rollfeed.types import Prompt, Sample

RUN = """
import asyncio, pickle, sys
from pathlib import Path
from rollfeed import app
spec = pickle.loads(Path(sys.argv[1]).read_bytes())
asyncio.run(app.run(app.prepare(spec), out=Path(sys.argv[2])))
"""
FUNCTIONS = """
def score(sample, prompt):
    return float(len(sample.response) % 3)
"""


def settings_for(checkpoint: Path, **sections: Any) -> Settings:
    tree = {
        "seed": 3,
        "model": {"checkpoint": str(checkpoint)},
        "prompts": {"datasets": [{"path": "tasks.jsonl", "input_key": "q"}]},
        "rollout": {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "deterministic": True},
        "sampling": {"rollout_max_response_len": 4},
        "engine": {"threads": 1, "num_slots": 4, "context_length": 256},
        "plugins": {"reward": "spec_rewards:score"},
    }
    return validate_settings({**tree, **sections}, where="test")


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "batches").iterdir())}


def test_a_pickled_spec_makes_the_same_bytes_in_another_process(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"q": "{number} + 1"}}\n' for number in range(5)))
    (tmp_path / "spec_rewards.py").write_text(FUNCTIONS)
    spec = RunSpec(settings_for(tiny_checkpoint), (tmp_path,))
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    asyncio.run(app.run(app.prepare(spec), out=tmp_path / "here"))
    subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "spec", tmp_path / "there"], check=True, cwd="/", env={**os.environ}
    )
    here = files_of(tmp_path / "here")
    assert len(here) == 2
    assert files_of(tmp_path / "there") == here


def score(sample: Sample, prompt: Prompt, *, bonus: float = 0.0) -> float:
    return float(len(sample.response)) + bonus


async def test_functions_are_given_themselves_and_stored_as_their_import_paths(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"q": "1 + 1"}\n')
    settings = settings_for(tiny_checkpoint, plugins={"reward": partial(score, bonus=0.5)})
    spec = RunSpec(settings, (tmp_path,))
    assert pickle.loads(pickle.dumps(spec)).settings.plugins.reward.keywords == {"bonus": 0.5}
    await app.run(app.prepare(spec), out=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert reader.run().settings["plugins"]["reward"] == f"{__name__}:score"
        assert {member.reward % 1 for group in reader.summaries(0) for member in group.members} == {0.5}


@pytest.mark.parametrize("given", [3, "", ["a:b"]])
def test_what_is_no_path_and_no_function_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="string"):
        PluginSettings(reward=given)


def test_a_function_that_does_not_fit_is_refused_before_anything_starts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, plugins={"generate": lambda: None})
    with pytest.raises(ConfigError, match=r"plugins\.generate: does not fit GenerateFn"):
        app.prepare(RunSpec(settings, (tmp_path,)))


def test_a_settings_file_is_looked_for_beside_itself_and_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "run.toml").write_text('[[prompts.environments]]\nid = "core/copy_text"\n')
    monkeypatch.chdir(tmp_path / "here")
    spec = RunSpec.load(tmp_path / "run.toml", ["train.loss.kl_coefficient=0.5"])
    assert spec.folders == (tmp_path, tmp_path / "here")
    assert spec.chosen == {"train.loss.kl_coefficient"}
