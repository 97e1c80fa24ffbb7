"""Runs of a sweep are ordinary runs: each in a process and a folder of its own, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfeed.store import RunReader


@pytest.fixture
def file(settings_file, tmp_path: Path) -> Path:
    """Return a settings file of one step."""
    (tmp_path / "small.toml").write_text("[rollout]\nrollout_batch_size = 2\nover_sampling_batch_size = 2\n")
    return settings_file(num_rollout=1)


def test_every_combination_is_run_once_and_one_that_fails_does_not_end_the_others(
    rollfeed, file: Path, tmp_path: Path
) -> None:
    rewards = "def score(sample, prompt):\n    return 0.5\n\ndef fail(sample, prompt):\n    raise ValueError('no')\n"
    (tmp_path / "sweep_rewards.py").write_text(rewards)
    out = tmp_path / "sweep"
    fixed = ["reward.override_environments=true", "reward.functions_in_workers=false", "rollout.failure_minimum=1"]
    options = [word for each in fixed for word in ("--set", each)]
    command = ["sweep", file, tmp_path / "small.toml", "--out", out, *options, "--grid", "seed=2", "--grid"]
    ran = rollfeed(*command, "plugins.reward=sweep_rewards:fail,sweep_rewards:score")
    assert ran.code == 1, ran.err
    assert "run 2 of 2" in ran.err
    failed, finished = sorted(out.iterdir())
    with RunReader(finished) as reader:
        stored = reader.run().settings
        assert reader.steps()[-1].metrics["rollout/reward_mean"] == 0.5
    assert "train" not in stored  # with one, the run's settings.json would be that of a training
    assert (stored["seed"], stored["rollout"]["rollout_batch_size"]) == (2, 2)
    lines = ran.out.splitlines()
    assert lines[0].split() == ["seed", "plugins.reward", "steps", "reward", "accuracy", "status"]
    assert lines[1].split() == ["2", "sweep_rewards:fail", "0", "-", "-", "failed"]
    assert lines[2].split() == ["2", "sweep_rewards:score", "1", "0.5000", "-", "finished"]
    assert lines[3].startswith(f"{failed}: failed: ")
    assert "ValueError: no" in lines[3]
    before = (finished / "journal.sqlite").stat().st_mtime_ns

    again = rollfeed(*command, "plugins.reward=sweep_rewards:score", "--json")
    assert again.code == 0
    assert "run 1 of" not in again.err
    assert (finished / "journal.sqlite").stat().st_mtime_ns == before
    assert [(row["status"], row["reward"]) for row in again.json["runs"]] == [("finished", 0.5)]

    other = rollfeed(*command, "plugins.reward=sweep_rewards:score", "--set", "rollout.n_samples_per_prompt=4")
    assert other.code == 2
    assert f"{finished}: holds a finished run" in other.err


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["num_rollout=1,2"], "num_rollout: unknown setting; did you mean rollout.num_rollout?"),
        (["rollout.num_rollout=1,0"], "rollout.num_rollout = 0: input should be greater than or equal to 1"),
        (["seed"], "--grid 'seed': write it as section.key=a,b, for example seed=1,2"),
        (["seed=1,"], "--grid 'seed=1,': write it as section.key=a,b, for example seed=1,2"),
        (["seed=1,1"], "--grid 'seed=1,1': a value is given twice; leave one out"),
        (["seed=1", "seed=2"], "--grid 'seed=2': the key is given twice; leave one out"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_before_anything_starts(
    rollfeed, file: Path, tmp_path: Path, grid: list[str], message: str
) -> None:
    options = [word for each in grid for word in ("--grid", each)]
    ran = rollfeed("sweep", file, "--out", tmp_path / "sweep", *options)
    assert ran.code == 2
    assert ran.err.splitlines()[0].endswith(message)
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "sweep").exists()


def test_values_in_brackets_and_quotes_are_one_and_folders_have_plain_names() -> None:
    from rollfeed.cli.sweep import _grid, _name

    (values,) = _grid(["filters.dynamic_sampling=[],[{name = 'reward_std'}, {name = 'a,b'}]"]).values()
    assert values == ["[]", "[{name = 'reward_std'}, {name = 'a,b'}]"]
    names = {_name({"model.checkpoint": value}) for value in ("/a/b", "/a_b", "a" * 300, "a" * 301)}
    assert len(names) == 4
    assert all("/" not in name and len(name) < 140 for name in names)
    assert _name({"train.seed": "1", "seed": "2"}) == "train.seed=1,seed=2"
