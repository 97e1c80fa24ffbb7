"""`rollfeed train`: batches, updates, new weights, and going on after a kill."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from tests.integration.linting import findings_in

TRAIN = """
[train]
checkpoint_interval = {interval}
micro_batch_tokens = 512

[train.optimizer]
learning_rate = 1e-3

[reward]
override_environments = true

[plugins]
reward = "spread_reward:spread"
sample_hook = "spread_reward:keep"
"""
REWARD = """
import os
import signal
from pathlib import Path

KILL_WHEN = Path(__file__).with_name("kill_when")

def spread(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)

def keep(sample, prompt):
    if KILL_WHEN.exists() and Path(KILL_WHEN.read_text()).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
"""
DETERMINISTIC = ("--set", "rollout.deterministic=true")


@pytest.fixture(autouse=True)
def reward_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "spread_reward.py").write_text(REWARD)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("mode", ["sync", "partial", "async"])
def test_every_mode_trains_and_puts_the_weights_into_the_engine(rollfeed, settings_file, tmp_path, mode) -> None:
    out = tmp_path / "run"
    settings = settings_file(TRAIN.format(interval=2), num_rollout=4)
    result = rollfeed("train", settings, "--out", out, "--json", "--set", f"rollout.mode={mode}")
    assert result.code == 0, result.err
    assert result.json["num_steps"] == 4
    steps = lines(out / "train.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    log = (out / "run.log").read_text()
    assert all(f"step {step} is trained on in " in log for step in range(4))
    rollouts = lines(out / "metrics.jsonl")
    told = result.json["steps"]
    assert [each["reward"] for each in told] == [each["rollout/reward_mean"] for each in rollouts]
    assert [each["loss"] for each in told] == [each["train/loss"] for each in steps]
    assert (result.json["reward"], result.json["loss"]) == (told[-1]["reward"], told[-1]["loss"])
    for each in rollouts[1:]:
        assert each["time/train_seconds"] > 0
        assert each["time/publish_seconds"] > 0
    assert any(step["train/grad_norm"] > 0 for step in steps if "train/grad_norm" in step)
    versions = [
        pq.read_table(out / "batches" / f"step-{step:06d}.parquet").column("policy_version").to_pylist()[0]
        for step in range(4)
    ]
    assert versions == [0, 1, 2, 3]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000001", "step-000003"]
    assert findings_in(out) == []


def test_training_that_is_killed_at_any_step_ends_as_the_unbroken_one(
    rollfeed, start_rollfeed, settings_file, tmp_path
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    settings = settings_file(TRAIN.format(interval=2), num_rollout=6)
    assert rollfeed("train", settings, "--out", unbroken, *DETERMINISTIC).code == 0
    kill_when = tmp_path / "kill_when"
    for last in (0, 2, 3):
        kill_when.write_text(str(broken / "batches" / f"step-{last:06d}.parquet"))
        assert start_rollfeed("train", settings, "--out", broken, *DETERMINISTIC).wait() == -9
    kill_when.unlink()
    assert rollfeed("train", settings, "--out", broken, *DETERMINISTIC).code == 0
    for path in sorted((unbroken / "batches").glob("*.parquet")):
        assert (broken / "batches" / path.name).read_bytes() == path.read_bytes()
    assert without_times(lines(broken / "train.jsonl")) == without_times(lines(unbroken / "train.jsonl"))
    last = Path("checkpoints", "step-000005", "trainer.safetensors")
    theirs, ours = load_file(unbroken / last), load_file(broken / last)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_a_finished_training_goes_on_as_if_it_had_been_longer(rollfeed, settings_file, tmp_path) -> None:
    longer, extended = tmp_path / "longer", tmp_path / "extended"
    settings = settings_file(TRAIN.format(interval=2), num_rollout=2)
    more = ("--set", "rollout.num_rollout=4")
    assert rollfeed("train", settings, "--out", longer, *DETERMINISTIC, *more).code == 0
    assert rollfeed("train", settings, "--out", extended, *DETERMINISTIC).code == 0
    refused = rollfeed("train", settings, "--out", extended, *DETERMINISTIC)
    assert refused.code == 2
    assert "a finished training of 2 batches; raise rollout.num_rollout to train on" in refused.err
    result = rollfeed("train", settings, "--out", extended, "--json", *DETERMINISTIC, *more)
    assert result.json["num_resumed_steps"] == 2
    assert without_times(lines(extended / "train.jsonl")) == without_times(lines(longer / "train.jsonl"))
    theirs, ours = (load_file(out / "model" / "model.safetensors") for out in (longer, extended))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_a_checkpoint_of_other_settings_is_refused_and_nothing_changed(rollfeed, settings_file, tmp_path) -> None:
    out = tmp_path / "run"
    settings = settings_file(TRAIN.format(interval=1), num_rollout=2)
    assert rollfeed("train", settings, "--out", out).code == 0
    before = (out / "train.jsonl").read_bytes()
    result = rollfeed("train", settings, "--out", out)
    assert result.code == 2
    assert "finished" in result.err
    other = rollfeed("train", settings, "--out", out, "--set", "train.optimizer.learning_rate=0.5")
    assert other.code == 2
    assert (out / "train.jsonl").read_bytes() == before


EVAL = """
[eval]
num_prompts = 4
n_samples_per_prompt = 2

[[eval.environments]]
id = "core/copy_text"
"""


def test_ratios_are_1_under_restricted_sampling_where_the_engine_says_what_it_kept(
    rollfeed, settings_file, tmp_path
) -> None:
    """Partial mode: stale tokens are corrected for, and those of the first batch need no correction."""
    settings, out = settings_file(TRAIN.format(interval=2), num_rollout=2), tmp_path / "run"
    sampling = ("rollout_top_p=0.8", "rollout_top_k=200", "min_new_tokens=2", "return_sampling_mask=true")
    options = [part for each in sampling for part in ("--set", f"sampling.{each}")]
    result = rollfeed("train", settings, "--out", out, "--json", "--set", "rollout.mode=partial", *options)
    assert result.code == 0, result.err
    assert "train.loss.correction = 'truncate'" in result.err
    first = lines(out / "train.jsonl")[0]
    assert first["train/mismatch_abs_max"] < 1e-4
    assert first["train/correction_weight"] == pytest.approx(1.0, abs=1e-4)
    batch = pq.read_table(out / "batches" / "step-000000.parquet").to_pylist()
    for row in batch:
        assert len(row["sampling_mask_lengths"]) == row["response_length"]
        assert sum(row["sampling_mask_lengths"]) == len(row["sampling_mask_token_ids"])
        assert max(row["sampling_mask_lengths"]) <= 200
    assert findings_in(out) == []


def test_training_evaluates_before_between_and_after(rollfeed, settings_file, tmp_path) -> None:
    out = tmp_path / "run"
    settings = settings_file(TRAIN.format(interval=2) + EVAL, num_rollout=4)
    trained = rollfeed("train", settings, "--out", out, "--set", "train.eval_interval=2", "--json")
    change = trained.json["eval"]["final"]["change"]["core/copy_text@0"]
    assert (change["since"], change["num_prompts"]) == (0, 4)
    assert change["low"] <= change["accuracy"] <= change["high"]
    drawn = [(out / "curve.png").read_bytes()[:4], (out / "curve.html").read_bytes()[:15]]
    assert drawn == [b"\x89PNG", b"<!DOCTYPE html>"]
    shown = rollfeed("show", out, "--json").json["eval"]
    assert shown == trained.json["eval"]
    assert [point["step"] for point in shown["curve"]] == [0, 2, 4]
    assert 0.0 <= shown["final"]["accuracy"] <= 1.0
    assert shown["final"]["sets"]["core/copy_text@0"]["num_prompts"] == 4


def test_check_shows_what_a_method_and_single_keys_come_to(rollfeed, settings_file) -> None:
    settings = settings_file(TRAIN.format(interval=1))
    overrides = ("--set", "train.method=dapo", "--set", "train.loss.clip_low=0.1")
    result = rollfeed("check", settings, *overrides)
    assert result.code == 0, result.err
    (line,) = (line for line in result.out.splitlines() if line.startswith("method"))
    for shown in ("method = dapo", "advantage.divide_by_std = True", "loss.clip_low = 0.1", "loss.clip_high = 0.28"):
        assert shown in line
    training = rollfeed("check", settings, "--json", *overrides).json["training"]
    assert (training["loss"]["normalisation"], training["loss"]["dual_clip"]) == ("token", 3.0)


def test_what_is_stored_is_what_is_trained(rollfeed, settings_file, tmp_path, tiny_checkpoint) -> None:
    """An estimator over the batch, a penalty and masked answers are in the file; another trainer repeats the step."""
    from rollfeed.config import RunSpec
    from rollfeed.store import RunReader
    from rollfeed.training.trainer import Trainer

    out = tmp_path / "run"
    text = TRAIN.format(interval=1) + '[advantage]\nestimator = "reinforce_pp"\n[reward.overlong]\ncache = 8\n'
    settings = settings_file(text.replace("override_environments = true", ""), num_rollout=1)
    overrides = (
        "reward.override_environments=true",
        "rollout.mask_truncated=true",
        "rollout.over_sampling_batch_size=3",  # what is kept are the same groups, whoever is first
        f"sampling.rollout_stop_token_ids={list(range(60, 90))}",
    )
    result = rollfeed("train", settings, "--out", out, *(part for each in overrides for part in ("--set", each)))
    assert result.code == 0, result.err
    with RunReader(out) as run:
        batch = run.batch(0)
    kept = [not sample.remove_sample for sample in batch.samples]
    assert kept == [sample.status != "truncated" for sample in batch.samples]
    assert 1 < sum(kept) < len(kept)
    assert batch.penalties_S is not None
    final = [sample.reward + penalty for sample, penalty in zip(batch.samples, batch.penalties_S, strict=True)]
    tokens = [value for s, value in zip(batch.samples, final, strict=True) for _ in s.logprobs if not s.remove_sample]
    expected = (np.array(final) - np.mean(tokens)) / np.std(tokens, ddof=1)
    np.testing.assert_allclose(batch.advantages_S, expected, rtol=1e-4)
    trainer = Trainer(
        tiny_checkpoint,
        settings=RunSpec.load(settings, overrides).settings.train,
        temperature=1.0,
        num_batches=1,
        max_response_length=12,
    )
    (logged,) = lines(out / "train.jsonl")
    metrics = trainer.train_step(batch).metrics
    assert {name: logged[name] for name in metrics} == pytest.approx(dict(metrics), rel=1e-5)
