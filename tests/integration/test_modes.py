"""Every mode as `rollfeed run` runs it, with a real model."""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.integration.linting import findings_in

MODES = ["sync", "partial", "async"]


def trained(out: Path) -> list[str]:
    paths = sorted((out / "batches").glob("*.parquet"))
    return [name for path in paths for name in pq.read_table(path).column("prompt_id").to_pylist()]


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_each_prompt_once(rollfeed, settings_file, tmp_path: Path, mode: str) -> None:
    out = tmp_path / "run"
    result = rollfeed("run", settings_file(num_rollout=5), "--out", out, "--set", f"rollout.mode={mode}")
    assert result.code == 0, result.err
    assert set(Counter(trained(out)).values()) == {2}  # samples of a group
    last = metrics(out)[-1]
    places = ("trained", "dropped", "failed", "discarded", "surplus", "requeued", "in_flight")
    assert last["ledger/drawn"] == sum(last[f"ledger/{place}"] for place in places)
    assert findings_in(out) == []


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_an_outside_trainer_are_followed(
    rollfeed, settings_file, tiny_checkpoint: Path, tmp_path: Path, mode: str
) -> None:
    out, folder, num_rollout = tmp_path / "run", tmp_path / "weights", 4
    ended = threading.Event()

    def train() -> None:
        """Publish version n when batch n - 1 is there."""
        for step in range(num_rollout):
            while not (out / "batches" / f"step-{step:06d}.parquet").exists():
                if ended.wait(0.02):
                    return
            shutil.copytree(tiny_checkpoint, folder / f".version-{step + 1}")
            (folder / f".version-{step + 1}").rename(folder / f"version-{step + 1:06d}")

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        extra = f'[weights]\nsource = "directory"\ndirectory = "{folder}"\npoll_seconds = 0.05\ntimeout_seconds = 60\n'
        settings = settings_file(extra, num_rollout=num_rollout)
        options = ("--set", f"rollout.mode={mode}", "--set", "rollout.max_staleness=1")
        result = rollfeed("run", settings, "--out", out, *options)
    finally:
        ended.set()
        trainer.join()
    assert result.code == 0, result.err
    steps = metrics(out)
    versions = [pq.read_table(out / "batches" / f"step-{n:06d}.parquet") for n in range(num_rollout)]
    for step, table in enumerate(versions):
        version = table.column("policy_version").to_pylist()[0]
        assert version == step if mode != "async" else step - 1 <= version <= step
        assert steps[step]["rollout/staleness_max"] <= 1
    assert findings_in(out) == []


def test_a_trainer_that_never_comes_ends_the_run_with_what_was_waited_for(
    rollfeed, settings_file, tmp_path: Path
) -> None:
    extra = f'[weights]\nsource = "directory"\ndirectory = "{tmp_path / "none"}"\ntimeout_seconds = 0.2\n'
    out = tmp_path / "run"
    result = rollfeed("run", settings_file(extra), "--out", out)
    assert result.code == 1
    assert "version 1" in result.err
    assert "weights.timeout_seconds" in result.err
    assert len(metrics(out)) == 1
