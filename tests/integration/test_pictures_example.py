"""The example with pictures: trained from the command line, gone on with, and stopped where pictures do not arrive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.integration.linting import findings_in

SETTINGS = Path(__file__).parents[2] / "examples" / "pictures" / "train.toml"
FEWER = (
    "rollout.num_rollout=4",
    "rollout.rollout_batch_size=4",
    "rollout.n_samples_per_prompt=8",
    "eval.num_prompts=8",
)
SMALL = ("model.tiny.hidden_size=32", "model.tiny.num_layers=1", "train.eval_interval=4", "train.checkpoint_interval=2")
OVERRIDES = [word for each in (*FEWER, *SMALL) for word in ("--set", each)]


def records(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in each.items() if not name.endswith("seconds")} for each in found]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_it_trains_on_pictures_that_engine_and_trainer_both_see(rollfeed, tmp_path: Path) -> None:
    ran = rollfeed("train", SETTINGS, "--out", tmp_path / "run", *OVERRIDES)
    assert ran.code == 0, ran.err
    assert "after 4 batches, core/name_colour@0: accuracy" in ran.out
    steps = records(tmp_path / "run" / "train.jsonl")
    assert len(steps) == 4
    assert all(step["train/picture_tokens"] == step["train/tokens"] > 0 for step in steps)
    assert all(step["train/picture_mismatch_kl"] < 1e-7 for step in steps)
    rows = [
        row
        for path in sorted((tmp_path / "run" / "batches").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == 4 * 4 * 8
    assert findings_in(tmp_path / "run") == []
    linted = rollfeed("lint", tmp_path / "run", "--json")
    assert (linted.code, linted.json["findings"]) == (0, [])
    assert "logprobs against the model: answers to pictures" in linted.out


def test_dots_are_counted_after_a_warm_up_that_sees_them(rollfeed, tmp_path: Path) -> None:
    few = ("stop_accuracy=0.03", "batch_size=8", "probe_interval=2", "probe_prompts=16")
    warm_up = [word for each in few for word in ("--set", f"train.warm_up.{each}")]
    ran = rollfeed("train", SETTINGS.with_name("count.toml"), "--out", tmp_path / "run", *OVERRIDES, *warm_up)
    assert ran.code == 0, ran.err
    assert "after 4 batches, core/count_dots@1: accuracy" in ran.out
    steps = records(tmp_path / "run" / "train.jsonl")
    assert all(step["train/picture_mismatch_kl"] < 1e-7 for step in steps)


def test_what_a_stopped_run_goes_on_to_is_what_one_that_was_not_stopped_has(rollfeed, tmp_path: Path) -> None:
    options = (*OVERRIDES, "--set", "rollout.deterministic=true")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert rollfeed("train", SETTINGS, "--out", whole, *options).code == 0
    half = rollfeed("train", SETTINGS, "--out", halves, *options, "--set", "rollout.num_rollout=2")
    assert half.code == 0, half.err
    rest = rollfeed("train", SETTINGS, "--out", halves, *options)
    assert rest.code == 0, rest.err
    assert contents(whole / "batches") == contents(halves / "batches")
    assert records(whole / "train.jsonl") == records(halves / "train.jsonl")


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_training_whose_engine_sees_no_pictures_is_stopped_before_its_first_update(
    is_guarded: bool, rollfeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollfeed.engine.local import EmbeddedEngine

    look = EmbeddedEngine.look

    async def blind(self: EmbeddedEngine, token_ids: Any, images: Any) -> Any:
        seen, pixels = await look(self, token_ids, images)
        return type(await look(self, token_ids, images))(seen, {name: values * 0 for name, values in pixels.items()})

    monkeypatch.setattr(EmbeddedEngine, "look", blind)
    guard = () if is_guarded else ("--set", "train.max_picture_mismatch_kl=0")
    ran = rollfeed("train", SETTINGS, "--out", tmp_path / "run", *OVERRIDES, *guard)
    if not is_guarded:
        assert ran.code == 0, ran.err
        assert records(tmp_path / "run" / "train.jsonl")[0]["train/picture_mismatch_kl"] > 1e-6
        return
    assert ran.code == 1
    assert "at answers to prompts with pictures the trainer's probabilities are" in ran.err
    assert "they have not seen the same pictures" in ran.err
    assert "nothing was changed" in ran.err
    assert not (tmp_path / "run" / "train.jsonl").exists() or records(tmp_path / "run" / "train.jsonl") == []
