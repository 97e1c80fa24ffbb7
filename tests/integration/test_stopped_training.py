"""A training that is stopped, fails or learns nothing: what it leaves, and what it says."""

import json
from pathlib import Path

import pytest

TRAIN = """
[train]
checkpoint_interval = 100
micro_batch_tokens = 512

[train.optimizer]
learning_rate = 1e-3

[reward]
override_environments = true

[plugins]
reward = "stopped_reward:score"
sample_hook = "stopped_reward:keep"
"""
REWARD = """
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent

def score(sample, prompt):
    if (HERE / "equal").exists():
        return 0.1
    is_broken = (HERE / "breaks").exists() and {span.policy_version for span in sample.version_spans} == {2}
    return float(sample.response_token_ids.sum() % 7) * (1e37 if is_broken else 1.0)

def keep(sample, prompt):
    stop = HERE / "stop_when"
    if stop.exists() and Path(stop.read_text()).exists():
        stop.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    return sample
"""
DETERMINISTIC = ("--set", "rollout.deterministic=true")


@pytest.fixture(autouse=True)
def reward_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "stopped_reward.py").write_text(REWARD)


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in lines(path)]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.soak)])
def test_a_training_that_is_stopped_goes_on_where_it_was(
    rollfeed, start_rollfeed, settings_file, tmp_path, mode
) -> None:
    out, options = tmp_path / "run", ("--set", f"rollout.mode={mode}")
    settings = settings_file(TRAIN, num_rollout=6)
    (tmp_path / "stop_when").write_text(str(out / "batches" / "step-000002.parquet"))
    stopped = start_rollfeed("train", settings, "--out", out, *options)
    assert stopped.wait() == 130
    (newest,) = checkpoints(out)
    num_trained = int(newest.removeprefix("step-")) + 1
    assert [row["step"] for row in lines(out / "train.jsonl")] == list(range(num_trained))
    again = rollfeed("train", settings, "--out", out, *options)
    assert again.code == 0, again.err
    assert f"goes on at step {num_trained} from {out / 'checkpoints' / newest}" in again.out.splitlines()
    assert [row["step"] for row in lines(out / "train.jsonl")] == list(range(6))


def test_a_stopped_training_ends_as_the_unbroken_one(rollfeed, start_rollfeed, settings_file, tmp_path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    settings = settings_file(TRAIN, num_rollout=4)
    assert rollfeed("train", settings, "--out", unbroken, *DETERMINISTIC).code == 0
    (tmp_path / "stop_when").write_text(str(broken / "batches" / "step-000001.parquet"))
    assert start_rollfeed("train", settings, "--out", broken, *DETERMINISTIC).wait() == 130
    again = rollfeed("train", settings, "--out", broken, *DETERMINISTIC)
    assert again.code == 0, again.err
    assert without_times(broken / "train.jsonl") == without_times(unbroken / "train.jsonl")
    names = (Path("model", "model.safetensors"), Path("batches", "step-000003.parquet"))
    assert all((broken / name).read_bytes() == (unbroken / name).read_bytes() for name in names)


def test_a_training_that_fails_keeps_what_it_trained(rollfeed, settings_file, tmp_path) -> None:
    out, settings = tmp_path / "run", settings_file(TRAIN, num_rollout=4)
    (tmp_path / "breaks").touch()
    assert rollfeed("train", settings, "--out", out).code == 1
    assert checkpoints(out) == ["step-000001"]
    (tmp_path / "breaks").unlink()
    again = rollfeed("train", settings, "--out", out)
    assert again.code == 0, again.err
    assert f"goes on at step 2 from {out}/checkpoints/step-000001" in again.out.splitlines()


def test_a_run_that_is_no_training_and_a_training_are_told_apart(rollfeed, settings_file, tmp_path) -> None:
    trained = tmp_path / "trained"
    settings = settings_file(TRAIN, num_rollout=1)
    assert rollfeed("train", settings, "--out", trained).code == 0
    for command in (
        ("run", "--resume", trained),
        ("run", settings, "--out", trained),
        ("run", "--resume", trained, "--step", 0),
    ):
        refused = rollfeed(*command)
        assert refused.code == 2
        assert f"{trained}: holds a training" in refused.err
        assert f"rollfeed train FILE --out {trained}" in refused.err


def test_training_does_not_replace_the_batches_of_an_unfinished_run(
    rollfeed, start_rollfeed, settings_file, tmp_path
) -> None:
    out, settings = tmp_path / "run", settings_file(TRAIN, num_rollout=3)
    (tmp_path / "stop_when").write_text(str(out / "batches" / "step-000000.parquet"))
    assert start_rollfeed("run", settings, "--out", out).wait() == 130
    for command in ("train", "check"):
        refused = rollfeed(command, settings, "--out", out)
        assert refused.code == 2
        assert "holds a run that was not trained on; go on with rollfeed run --resume" in refused.err
    assert (out / "batches" / "step-000000.parquet").exists()
    assert rollfeed("run", "--resume", out).code == 0


def test_batches_with_equal_rewards_are_said_to_change_nothing(rollfeed, settings_file, tmp_path) -> None:
    out, settings = tmp_path / "run", settings_file(TRAIN, num_rollout=4)
    (tmp_path / "equal").touch()
    result = rollfeed("train", settings, "--out", out)
    assert result.code == 0, result.err
    assert result.out.count("no update: all groups had equal rewards") == 4
    assert "nan" not in result.out.lower()
    (warning,) = (line for line in result.err.splitlines() if "in a row" in line)
    assert warning.startswith("3 batches in a row changed nothing: all groups had equal rewards (mean reward 0.100)")
    for remedy in (
        "reward_std",
        "filters.dynamic_sampling",
        "sampling.rollout_temperature = 1",
        "core/copy_text at level 0",
    ):
        assert remedy in warning
    assert "NaN" not in (out / "train.jsonl").read_text()
    assert [row["no_update"] for row in lines(out / "train.jsonl")] == ["all groups had equal rewards"] * 4
