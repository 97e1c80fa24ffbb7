"""Runs with a teacher, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from tests.integration.linting import findings_in

from rollfeed.config import TinyModelSettings
from rollfeed.engine.tiny import tiny_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "distillation" / "train.toml"
CHARACTERS = "abcdefghijrv:="
SMALL = (
    *("rollout.num_rollout=2", "rollout.rollout_batch_size=4", "rollout.n_samples_per_prompt=2", "engine.num_slots=8"),
    *("eval.num_prompts=8", "train.warm_up="),
)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model with the example's characters; its weights are large, so that it is sure of something."""
    settings = TinyModelSettings(characters=CHARACTERS, hidden_size=32, num_layers=1)
    made = tiny_checkpoint(settings, seed=77, cache_directory=tmp_path_factory.mktemp("models"))
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(made, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return folder


def options(*changes: str) -> list[str]:
    return [word for each in (*SMALL, *changes) for word in ("--set", each)]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((run / "batches").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def said_by(teacher: Path, row: dict[str, Any], temperature: float) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    ids, length = torch.tensor(row["token_ids"])[None], row["response_length"]
    with torch.no_grad():
        logprobs = (model(ids).logits[0, -length - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, -length:, None])[:, 0].numpy()


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_the_example_learns_from_what_its_teacher_says_of_each_token(
    mode: str, rollfeed: Any, teacher: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = [f"teacher.checkpoint={teacher}", f"rollout.mode={mode}", "sampling.rollout_temperature=0.8"]
    result = rollfeed("train", EXAMPLE, "--out", run, "--quiet", *options(*changes))
    assert result.code == 0, result.err
    rows = rows_of(run)
    assert len(rows) == 2 * 4 * 2
    for row in rows:
        told, mask = np.array(row["teacher_logprobs"]), np.array(row["loss_mask"])
        np.testing.assert_allclose(told, said_by(teacher, row, 0.8), atol=1e-3)
        np.testing.assert_allclose(row["advantage"], (told - np.array(row["logprobs"])) * mask, atol=1e-5)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["rollout/teacher_kl"] > 0.5
    assert findings_in(run) == []


def test_rewards_of_the_teacher_leave_it_to_the_environment_what_is_right(
    rollfeed: Any, teacher: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = [f"teacher.checkpoint={teacher}", "teacher.use=reward", "teacher.reduction=sum"]
    result = rollfeed("train", EXAMPLE, "--out", run, "--quiet", *options(*changes))
    assert result.code == 0, result.err
    for row in rows_of(run):
        above = np.array(row["teacher_logprobs"]) - np.array(row["logprobs"])
        assert row["reward"] == pytest.approx(above[np.array(row["loss_mask"]) > 0].sum(), abs=1e-4)
        assert row["correct"] in ("yes", "no")
        assert np.ndim(row["advantage"]) == 0
    assert findings_in(run) == []


def test_another_tokenizer_is_refused_before_anything_starts(rollfeed: Any, tmp_path: Path) -> None:
    settings = TinyModelSettings(characters="zyxabcdefghijrv:=", hidden_size=32, num_layers=1)
    other = tiny_checkpoint(settings, seed=1, cache_directory=tmp_path)
    checked = rollfeed("check", EXAMPLE, "--set", f"teacher.checkpoint={other}")
    assert checked.code != 0
    assert "its tokenizer is not the policy's: ':' has the id 14 here and 17 there" in checked.err
    missing = rollfeed("check", EXAMPLE, "--set", f"teacher.checkpoint={tmp_path / 'none'}")
    assert missing.code != 0
    assert "teacher.checkpoint = " in missing.err


def test_a_teacher_that_no_server_is_ends_the_run_at_its_start(rollfeed: Any, tmp_path: Path) -> None:
    changes = ["teacher.checkpoint=", 'teacher.servers=["http://127.0.0.1:9"]', "teacher.startup_timeout_seconds=0.5"]
    result = rollfeed("run", EXAMPLE, "--out", tmp_path / "run", "--quiet", *options(*changes))
    assert result.code != 0
    assert "teacher.servers: " in result.err
