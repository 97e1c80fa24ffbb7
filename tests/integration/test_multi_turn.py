"""Episodes of several turns in whole runs, with the embedded engine and a tiny model."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

SETTINGS = """
seed = 3
[model]
checkpoint = "tiny"
[model.tiny]
characters = "0123456789-?<>"
hidden_size = 32
num_layers = 2
num_heads = 2
[[prompts.environments]]
id = "core/guess_number"
level = 1
apply_chat_template = false
parameters = { style = "compact" }
[rollout]
num_rollout = 30
rollout_batch_size = 4
n_samples_per_prompt = 4
deterministic = true
[sampling]
rollout_max_response_len = 24
[engine]
context_length = 48
num_slots = 32
threads = 1
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "game.toml").write_text(SETTINGS)
    return tmp_path / "game.toml"


def test_a_run_of_episodes_that_is_killed_ends_as_the_unbroken_one(
    rollfeed, start_rollfeed, settings: Path, tmp_path: Path
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    ran = rollfeed("run", settings, "--out", unbroken, "--json")
    assert ran.code == 0, ran.err
    for _ in range(2):
        process = start_rollfeed("run", settings, "--out", broken, "--set", "rollout.num_rollout=100000")
        while not list((broken / "batches").glob("step-*")) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    # It may have come further than the other one, if it was long alone.
    num_steps = max(30, len(rollfeed("show", broken, "--json").json["steps"]))
    longer = ("--set", f"rollout.num_rollout={num_steps}")
    ran = rollfeed("run", "--resume", broken, *longer, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["ledger"]["trained"] == num_steps * 4
    for path in sorted((unbroken / "batches").glob("step-*")):
        assert (broken / "batches" / path.name).read_bytes() == path.read_bytes()
    assert not (broken / "turns.log").exists()


def test_what_the_environment_says_is_not_trained_on(rollfeed, settings: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    ran = rollfeed("run", settings, "--out", tmp_path / "run", "--set", "rollout.num_rollout=4")
    assert ran.code == 0, ran.err
    rows = [
        row
        for path in sorted((tmp_path / "run" / "batches").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == 4 * 4 * 4
    inserted = [row for row in rows if 0.0 in row["loss_mask"]]
    assert inserted
    for row in inserted:
        assert all(
            logprob == 0.0 for logprob, weight in zip(row["logprobs"], row["loss_mask"], strict=True) if not weight
        )
        assert 0.0 <= row["reward"] <= 1.0
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])


GAME = """
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Correct, Verdict


class Game:
    environment_id, version, summary, max_level = "my/game", 1, "goes wrong", 0

    def make(self, level, random):
        return str(random.randrange(10**6)), {}, None

    def verify(self, params, response):
        raise NotImplementedError

    def start(self, params):
        return {"heard": 0}

    def step(self, state, response):
        if state["heard"]:
            FAULT
        return EnvironmentStep(state={"heard": 1}, messages=({"role": "user", "content": "?"},))

    def give_up(self, state):
        return Verdict(reward=0.25, correct=Correct.NO)


async def length(sample, prompt):
    return float(sample.response_length)
"""


def with_game(settings: Path, fault: str) -> None:
    (settings.parent / "game.py").write_text(GAME.replace("FAULT", fault))
    text = settings.read_text().replace('"core/guess_number"\nlevel = 1', '"game.py:Game"\nlevel = 0')
    settings.write_text(text.replace('parameters = { style = "compact" }\n', ""))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('raise KeyError("lost")', "environment my/game: step raised KeyError: 'lost'"),
        ('return "no"', "environment my/game: step returned 'no'; that must be of EnvironmentStep"),
    ],
)
def test_an_environment_that_goes_wrong_in_an_episode_is_named(
    rollfeed, settings: Path, tmp_path: Path, fault: str, said: str
) -> None:
    with_game(settings, fault)
    ran = rollfeed("run", settings, "--out", tmp_path / "run")
    assert ran.code == 1
    assert said in ran.err
    if fault.startswith("raise"):
        assert "game.py:20, in step" in ran.err


@pytest.mark.parametrize("overrides", [False, True])
def test_a_reward_function_scores_episodes_where_it_overrides_environments(
    rollfeed, settings: Path, tmp_path: Path, overrides: bool
) -> None:
    import pyarrow.parquet as pq

    with_game(settings, "return EnvironmentStep(verdict=Verdict(reward=0.5, correct=Correct.YES))")
    options = (
        "--set",
        "plugins.reward=game.py:length",
        "--set",
        f"reward.override_environments={str(overrides).lower()}",
    )
    ran = rollfeed("run", settings, "--out", tmp_path / "run", "--set", "rollout.num_rollout=2", *options)
    assert ran.code == 0, ran.err
    rows = [
        row
        for path in sorted((tmp_path / "run" / "batches").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == 2 * 4 * 4
    for row in rows:
        assert row["reward"] == (row["response_length"] if overrides else {"completed": 0.5}.get(row["status"], 0.25))
