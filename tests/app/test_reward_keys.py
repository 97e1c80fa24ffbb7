"""A ``reward_key`` that no reward has is an error, before the run where that can be known, else in its first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollfeed.app import load_functions, prepare, run
from rollfeed.app.checks import check_combination, needs_keyed_cut
from rollfeed.config import RolloutConfig, RunSpec, Settings, validate_settings
from rollfeed.errors import ConfigError, RunFailedError
from rollfeed.store import RunReader

Make = Callable[..., Settings]
ENVIRONMENT = {"environments": [{"id": "core/add_numbers"}]}


@pytest.fixture
def settings_for(tiny_checkpoint: Path, tmp_path: Path) -> Make:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"q": "1+1", "a": "2", "m": {}}) + "\n" for _ in range(4)))
    dataset = {"path": "tasks.jsonl", "input_key": "q", "label_key": "a"}

    def make(*, prompts: Any = None, plugins: Any = None, metadata_key: str | None = None, **reward: Any) -> Settings:
        chosen = {**dataset, "metadata_key": metadata_key} if metadata_key else dataset
        tree = {
            "model": {"checkpoint": str(tiny_checkpoint)},
            "prompts": prompts or {"datasets": [chosen]},
            "rollout": {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 2},
            "sampling": {"rollout_max_response_len": 4},
            "engine": {"threads": 1, "num_slots": 4, "context_length": 256, "kernels": "torch"},
            "reward": reward,
            "plugins": plugins or {},
        }
        return validate_settings(tree, where="test")

    return make


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"rm_type": "math"}, "rewards of rm_type 'math' are single numbers, without keys: remove it"),
        ({"rm_type": "livecodebench"}, "'livecodebench' are single numbers"),
        ({"rm_type": "dapo"}, "rewards of rm_type 'dapo' have the keys acc, score: set it to one of them"),
        ({"rm_type": "boxed_dapo"}, "have the keys acc, score"),
        ({"rm_type": "rlve"}, "have the keys accuracy, format_score, reward"),
        ({"prompts": ENVIRONMENT}, "rewards of environments are single numbers"),
    ],
)
def test_a_key_that_no_grader_of_the_run_has_is_a_mistake(
    settings_for: Make, tmp_path: Path, reward: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.reward_key = 'scores': .*" + message):
        prepare(RunSpec(settings_for(reward_key="scores", **reward), (tmp_path,)))


@pytest.mark.parametrize(
    "reward",
    [
        {"rm_type": "dapo", "reward_key": "acc"},
        {"rm_type": "dapo", "reward_key": "score"},
        {"rm_type": "rlve", "reward_key": "accuracy"},
        {"rm_type": "math", "reward_key": "acc", "metadata_key": "m"},  # rows may name other graders
        {"rm_type": "remote_rm", "reward_key": "acc", "remote": {"url": "http://127.0.0.1:1/"}},
    ],
)
def test_a_key_that_a_reward_may_have_is_none(settings_for: Make, tmp_path: Path, reward: Any) -> None:
    settings = settings_for(**reward)
    load_functions(settings, folders=[tmp_path])
    check_combination(settings)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1.0", "reward_key = 'score': none of the 4 rewards of step 0 has keys, each is a single number"),
        ("{'acc': 1.0, 'bonus': 0.0}", r"reward_key = 'score' is not in the reward, which has \['acc', 'bonus'\]"),
    ],
)
async def test_a_function_without_the_key_ends_the_run_with_the_keys_there_are(
    settings_for: Make, tmp_path: Path, body: str, message: str
) -> None:
    name = f"keys_{'number' if body == '1.0' else 'named'}"
    (tmp_path / f"{name}.py").write_text(f"async def score(sample, prompt):\n    return {body}\n")
    settings = settings_for(plugins={"reward": f"{name}:score"}, reward_key="score")
    with pytest.raises(RunFailedError, match=message):
        await run(prepare(RunSpec(settings, (tmp_path,))), out=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert reader.steps() == ()


@pytest.mark.parametrize(("key", "expected"), [("score", -1.0), ("acc", 0.0)])
async def test_a_run_trains_on_the_key_of_dapo(settings_for: Make, tmp_path: Path, key: str, expected: float) -> None:
    await run(prepare(RunSpec(settings_for(rm_type="dapo", reward_key=key), (tmp_path,))), out=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        rewards = [member.reward for group in reader.summaries(0) for member in group.members]
    assert rewards == [expected] * 4


async def test_numbers_count_beside_named_ones(settings_for: Make, tmp_path: Path) -> None:
    (tmp_path / "keys_mixed.py").write_text(
        "async def score(sample, prompt):\n    return {'score': 1.0} if sample.index % 2 else 0.25\n"
    )
    settings = settings_for(plugins={"reward": "keys_mixed:score"}, reward_key="score")
    await run(prepare(RunSpec(settings, (tmp_path,))), out=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        rewards = [member.reward for group in reader.summaries(0) for member in group.members]
    assert sorted(rewards) == [0.25, 0.25, 1.0, 1.0]


@pytest.mark.parametrize(("use", "is_needed"), [("loss", True), ("reward", False)])
def test_rewards_of_a_teacher_have_no_keys_to_wait_for(use: str, is_needed: bool) -> None:
    remote = {"rm_type": "remote_rm", "reward_key": "score", "remote": {"url": "http://127.0.0.1:9"}}
    config = RolloutConfig.model_validate({"reward": remote, "teacher": {"checkpoint": "x", "use": use}})
    assert needs_keyed_cut(config) is is_needed
