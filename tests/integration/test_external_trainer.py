"""The trainer of examples/external_trainer learns in one process what another one generates."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed.store import RunReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "external_trainer"


FEWER = ("--set", "rollout.num_rollout=2", "--set", "rollout.rollout_batch_size=4")


@contextmanager
def run_in_another_process(*options: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "rollfeed", "run", *options, "--quiet"])
    try:
        yield
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def trainer() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE / "trainer.py"))


def test_two_batches_are_trained_and_a_trainer_that_is_started_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    from rollfeed.app import load_settings_model, stored_spec

    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    with run_in_another_process(str(EXAMPLE / "run.toml"), "--out", str(out), *FEWER):
        trainer["train"](out)
    weights = tmp_path / "runs" / "outside-weights"
    assert sorted(each.name for each in weights.iterdir()) == ["version-000001", "version-000002"]
    with RunReader(out) as run:
        batches = [run.batch(step) for step in (0, 1)]
    assert [batch.policy_version for batch in batches] == [0, 1]
    first = load_settings_model(stored_spec(out).settings).checkpoint
    for folder, batch in zip((first, weights / "version-000001"), batches, strict=True):
        # Where the weights are those sampled with, all ratios are 1, and the loss is the mean advantage of the tokens.
        lengths_S = np.array([np.sum(sample.loss_mask) for sample in batch.samples])
        expected = -float((batch.advantages_S * lengths_S).sum() / lengths_S.sum())
        loss = trainer["policy_loss"](AutoModelForCausalLM.from_pretrained(folder), batch)
        assert loss.item() == pytest.approx(expected, abs=1e-5)
    with run_in_another_process("--resume", str(out), "--step", "1", "--set", "rollout.num_rollout=3"):
        pass  # version 2 is there, so that it waits for nobody
    trainer["train"](out)
    assert (weights / "version-000003" / "optimizer.pt").exists()


@pytest.mark.soak
def test_the_trainer_learns_to_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with run_in_another_process(str(EXAMPLE / "run.toml"), "--out", str(tmp_path / "run")):
        trainer["train"](tmp_path / "run")
    with RunReader(tmp_path / "run") as run:
        rewards = [record.metrics["rollout/reward_mean"] for record in run.steps()]
    assert np.mean(rewards[:5]) < 0.15
    assert np.mean(rewards[-10:]) > 0.8
