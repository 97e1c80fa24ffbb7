"""Data that ends finishes the run: what was made stays, is evaluated and saved."""

import json
from pathlib import Path

import pytest

SETTINGS = """
[model]
checkpoint = "{checkpoint}"

[prompts]
num_epoch = 1
[[prompts.datasets]]
path = "data.jsonl"
label_key = "label"

[rollout]
num_rollout = 10
rollout_batch_size = 2
n_samples_per_prompt = 2

[sampling]
rollout_max_response_len = 8

[engine]
threads = 1
num_slots = 8
context_length = 256

[train.optimizer]
schedule = "linear"

[eval]
rm_type = "exact"
n_samples_per_prompt = 1
[[eval.datasets]]
path = "data.jsonl"
label_key = "label"

[plugins]
reward = "ending_reward:score"
"""
LONGER = ("--set", "prompts.num_epoch=2", "--set", "train.optimizer.decay_batches=5")
REWARD = """
def score(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)
"""


@pytest.fixture
def settings(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    rows = [{"prompt": f"What is {number} + 1?", "label": str(number + 1)} for number in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ending_reward.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(SETTINGS.format(checkpoint=tiny_checkpoint))
    return tmp_path / "run.toml"


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_training_ends_with_its_data_and_goes_on_with_more_of_it(rollfeed, settings, tmp_path) -> None:
    out = tmp_path / "run"
    result = rollfeed("train", settings, "--out", out)
    assert result.code == 0, result.err
    (ending,) = (line for line in result.out.splitlines() if "the data ended" in line)
    assert ending.startswith("the data ended after 2 batches; 10 were asked for; prompts left over: 1")
    assert (out / "model" / "config.json").exists()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000001"]
    assert [each["step"] for each in lines(out / "eval.jsonl")] == [0, 2]
    rates = [each.get("train/learning_rate") for each in lines(out / "train.jsonl")]
    assert rates[1] in (0.0, None)  # the schedule is as long as the data
    shown = rollfeed("show", out, "--json").json["run"]
    assert (shown["status"], shown["cause"]) == ("finished", ending)
    again = rollfeed("train", settings, "--out", out)
    assert again.code == 2
    assert "holds a finished training of 2 batches (the data ended after 2 batches" in again.err
    assert "raise prompts.num_epoch to train on" in again.err
    more = rollfeed("train", settings, "--out", out, *LONGER, "--json")
    assert more.code == 0, more.err
    assert (more.json["num_steps"], more.json["num_resumed_steps"]) == (5, 2)
    assert more.json["early_end"] == "the data ended after 5 batches; 10 were asked for"
    assert more.json["ledger"]["trained"] == 10


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_ends_with_its_data(rollfeed, settings, tmp_path, mode: str) -> None:
    out = tmp_path / "run"
    result = rollfeed("run", settings, "--out", out, "--json", "--set", f"rollout.mode={mode}")
    assert result.code == 0, result.err
    assert result.json["num_steps"] == 2
    expected = "the data ended after 2 batches; 10 were asked for; prompts left over: 1"
    assert result.json["early_end"].startswith(expected)
    ledger = result.json["ledger"]
    assert (ledger["drawn"], ledger["trained"], ledger["failed"]) == (5, 4, 0)
    assert ledger["requeued"] + ledger["surplus"] + ledger["in_flight"] == 1
    resumed = rollfeed("run", "--resume", out)
    assert resumed.code == 2
    assert "holds a finished run (the data ended after 2 batches" in resumed.err


def test_data_of_which_no_batch_could_be_made_fails_the_run(rollfeed, settings, tmp_path) -> None:
    (tmp_path / "ending_reward.py").write_text("def score(sample, prompt):\n    return 0.5\n")
    filtered = ("--set", 'filters.dynamic_sampling=[{name = "reward_std"}]')
    result = rollfeed("run", settings, "--out", tmp_path / "run", *filtered)
    assert result.code == 1
    assert "rollfeed: step 0 has 0 of 2 groups after 5 prompts and the prompt source has ended" in result.err
    assert "5 dropped as zero_std_0.5" in result.err


def test_check_says_how_many_batches_there_are(rollfeed, settings) -> None:
    result = rollfeed("check", settings)
    assert result.code == 0, result.err
    expected = "data     5 prompts x 1 epoch are 2 batches of 2; num_rollout = 10: the run ends after 2"
    assert expected in result.out.splitlines()
    refused = rollfeed("check", settings, "--set", "rollout.rollout_batch_size=6")
    assert refused.code == 2
    assert "5 prompts x 1 fill no batch of rollout.rollout_batch_size = 6" in refused.err
