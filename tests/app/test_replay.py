"""A replay makes of stored answers what a run makes of the same answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfeed import app
from rollfeed.app import StepReplay, replay_run
from rollfeed.app.replay.allowed import check_groups
from rollfeed.cli.main import main
from rollfeed.config import validate_settings
from rollfeed.errors import ConfigError
from rollfeed.store import RunDirectory, RunReader
from rollfeed.store.tables.parquet import batch_table
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine, make_group, make_prompt
from rollfeed.types import TrainBatch

REWARDS = """
def digit(sample, prompt):
    return float(sample.response)

def is_large(sample, prompt):
    return float(int(sample.response) >= 8)

def of_lists(completions, **columns):
    return [float(each) for each in completions]

async def judge(sample, prompt):
    return 1.0

def broken(sample, prompt):
    if int(sample.response) == 3:
        raise ValueError("three")
    return 1.0

"""
MakeRun = Callable[..., Any]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that makes a run with a scripted engine: three steps of two groups of three."""
    (tmp_path / "replay_rewards.py").write_text(REWARDS)

    async def run(name: str, reward: str | None, *, mode: str = "sync", **changes: Any) -> Path:
        tree: dict[str, Any] = {
            "prompts": {"environments": [{"id": "core/copy_text"}]},
            "rollout": {
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 3,
                "mode": mode,
                "deterministic": mode != "async",
            },
            "reward": {"functions_in_workers": False},
            "filters": {"dynamic_sampling": [{"name": "reward_std"}]},
            "plugins": {} if reward is None else {"reward": f"replay_rewards:{reward}"},
        }
        for key, value in changes.items():
            section, key = key.split("__")
            tree.setdefault(section, {})[key] = value
        settings, out = validate_settings(tree, where="test"), tmp_path / name
        opened = RunDirectory.open(
            out,
            settings=settings.model_dump(mode="json"),
            identity=settings.identity(),
            overwrite=False,
            folders=[tmp_path],
        )
        with opened as directory:
            rollouts = app.open_rollouts(
                settings,
                source=ListSource([f"prompt {number}" for number in range(10_000)]),
                engine=ScriptedEngine(),
                tokenizer=CharTokenizer(),
                folders=[tmp_path],
                commit=lambda commit: directory.commit(commit, reward_key=settings.reward.reward_key),
            )
            async with rollouts:
                for _ in range(3):
                    await rollouts.generate_batch()
            directory.finish(None)
        return out

    return run


async def replayed(run: Path, *overrides: str) -> list[StepReplay]:
    return [each async for each in replay_run(run, overrides)]


def rows_of(batch: TrainBatch) -> list[dict[str, Any]]:
    """Return what is stored of a batch, but for times."""
    rows: list[dict[str, Any]] = batch_table(batch, reward_key=None).to_pylist()
    return rows


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward__overlong": {"cache": 2, "length": 2}, "advantage__divide_by_std": True},
        {"rollout__mask_truncated": True, "sampling__rollout_max_response_len": 1},
        {"filters__over_sampling": {"name": "reward_std", "num_extra": 2}},
        {"filters__dynamic_sampling": [{"name": "all_wrong", "threshold": 8.5}, {"name": "reward_std"}]},
        {"filters__dynamic_sampling": [{"name": "reward_std", "keep_when_short": True, "tolerance": 4.0}],
         "rollout__max_draws_per_batch": 2},
    ],
)  # fmt: skip
async def test_a_replay_of_a_run_makes_the_same_bytes(make_run: MakeRun, mode: str, changes: dict[str, Any]) -> None:
    run = await make_run("run", "digit", mode=mode, **changes)
    steps = await replayed(run)
    assert [each.step for each in steps] == [0, 1, 2]
    assert all(each.identical for each in steps)
    assert sum(each.rewards_changed + each.advantages_changed for each in steps) == 0


async def test_with_another_reward_the_batch_is_that_of_a_fresh_run(make_run: MakeRun) -> None:
    few, fresh = await make_run("few", "is_large"), await make_run("fresh", "digit")
    first = (await replayed(few, "plugins.reward=replay_rewards:digit"))[0]
    with RunReader(few) as before, RunReader(fresh) as other:
        old, new = before.batch(0), other.batch(0)
        dropped = before.dropped(0)
    assert dropped, "the test needs groups that the other reward keeps"
    assert first.batch is not None
    assert rows_of(first.batch) == rows_of(new)
    assert first.batch.metrics == {name: new.metrics[name] for name in first.batch.metrics}
    indices, indices_now = ({group.group_index for group in batch.groups} for batch in (old, new))
    assert (set(first.entered), set(first.left)) == (indices_now - indices, indices - indices_now)
    assert not first.identical
    rewards = [int(s.response) for g in (*old.groups, *(d.group for d in dropped)) for s in g.samples]
    assert first.num_rollouts == len(rewards)
    assert first.rewards_changed == sum(reward != (reward >= 8) for reward in rewards)
    assert first.reward_now == pytest.approx(np.mean(rewards))
    assert first.num_surplus == len(old.groups) + len(dropped) - sum(first.dropped_now.values()) - 2
    assert first.dropped_before == {"zero_std_0.0": len(dropped)} or sum(first.dropped_before.values()) == len(dropped)


async def test_with_a_reward_that_keeps_fewer_groups_the_batch_is_short(make_run: MakeRun) -> None:
    run = await make_run("run", "digit")
    steps = await replayed(run, "plugins.reward=replay_rewards:is_large")
    assert all(each.kept_now <= each.kept_before == 2 for each in steps)
    assert any(each.kept_now < 2 for each in steps)
    for each in steps:
        assert (each.batch is None) is (each.kept_now == 0)


async def test_advantages_and_penalties_alone_change_advantages_alone(make_run: MakeRun) -> None:
    run = await make_run("run", "digit")
    for override in ("advantage.divide_by_std=true", "reward.overlong={cache = 1, length = 1}"):
        steps = await replayed(run, override)
        assert sum(each.rewards_changed for each in steps) == 0
        assert sum(each.advantages_changed for each in steps) == (17 if "divide" in override else 0)  # one has none
        assert not any(each.identical for each in steps)


async def test_masks_are_taken_back_and_made_again(make_run: MakeRun) -> None:
    limits = {"rollout__mask_truncated": True, "sampling__rollout_max_response_len": 1}
    masked = await make_run("masked", "digit", **limits)
    plain = await make_run("plain", "digit", sampling__rollout_max_response_len=1)
    for run, other, value in ((masked, plain, "false"), (plain, masked, "true")):
        steps = await replayed(run, f"rollout.mask_truncated={value}")
        with RunReader(other) as reader:
            for each in steps:
                assert each.batch is not None
                assert rows_of(each.batch) == rows_of(reader.batch(each.step))
        assert any(each.trained_tokens_before != each.trained_tokens_now for each in steps)


async def test_a_reward_that_fails_drops_its_group_and_says_why(make_run: MakeRun) -> None:
    run = await make_run("run", "digit")
    steps = await replayed(run, "plugins.reward=replay_rewards:broken")
    failures = [failure for each in steps for failure in each.failures]
    assert len(failures) == sum(each.dropped_now.get("failed", 0) for each in steps) > 0
    assert all("ValueError: three" in failure and "replay_rewards.py" in failure for failure in failures)


async def test_a_reward_that_came_with_its_answer_is_kept(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "replay_answers.py").write_text(
        "from dataclasses import replace\n\n"
        "async def answer(request, services):\n"
        "    samples = await services.default(request, services=services)\n"
        "    return [replace(sample, reward=float(sample.response) / 2) for sample in samples]\n"
    )
    run = await make_run("run", "digit", plugins__generate="replay_answers:answer")
    assert all(each.identical for each in await replayed(run))
    assert all(each.identical for each in await replayed(run, "plugins.reward=replay_rewards:is_large"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.num_rollout=3", "--set rollout.num_rollout=3: a replay answers nothing again, and changes only"),
        ("train.method=grpo", "--set train.method=grpo: a replay answers nothing again"),
        ("reward=3", "reward = 3: input should be a valid"),
        ("reward.rm_typ=math", "reward.rm_typ: unknown setting; did you mean rm_type?"),
        (
            "plugins.reward=replay_rewards:judge",
            "plugins.reward = 'replay_rewards:judge' is async and may ask",
        ),
        ("reward.rm_type=math", "plugins.reward scores, and no grader: unset it with --set plugins.reward="),
        ("reward.pure=false", "reward.pure = false: the same answer may have another reward"),
        ("plugins.reward=replay_rewards:none", "plugins.reward"),
    ],
)
async def test_what_cannot_be_replayed_is_refused(make_run: MakeRun, override: str, message: str) -> None:
    run = await make_run("run", "digit")
    with pytest.raises(ConfigError) as refused:
        await replayed(run, override)
    assert message in str(refused.value)


async def test_a_grader_takes_the_place_of_a_function_unless_it_asks_a_server(make_run: MakeRun) -> None:
    run = await make_run("run", "digit")
    steps = await replayed(run, "plugins.reward=", "reward.rm_type=random")
    assert {each.num_rollouts for each in steps} != {0}
    assert all(0.0 <= each.reward_now <= 1.0 for each in steps if each.reward_now is not None)
    with pytest.raises(ConfigError, match=r"rm_type = 'remote_rm' of \[reward\] asks a server"):
        await replayed(run, "plugins.reward=", "reward.rm_type=remote_rm")


@pytest.mark.parametrize("servers", [[], ["http://127.0.0.1:9"]])
def test_a_row_may_name_a_reward_model_that_is_here_and_none_on_servers(servers: list[str]) -> None:
    model = {"checkpoint": "x", "servers": servers}
    settings = validate_settings(
        {"reward": {"model": model}, "prompts": {"environments": [{"id": "core/copy_text"}]}}, where="test"
    )
    groups = [make_group([0.0, 1.0], prompt=make_prompt(metadata={"rm_type": "reward_model"}))]
    if not servers:
        check_groups(groups, settings)
        return
    with pytest.raises(ConfigError, match="rm_type 'reward_model' asks a server"):
        check_groups(groups, settings)


async def test_a_function_that_is_said_to_be_pure_is_replayed(make_run: MakeRun) -> None:
    run = await make_run("run", "judge", filters__dynamic_sampling=[])
    with pytest.raises(ConfigError, match=r"set reward\.pure = true if"):
        await replayed(run)
    assert all(each.identical for each in await replayed(run, "reward.pure=true"))


async def test_a_function_that_is_called_by_the_names_of_its_parameters_is_replayed(make_run: MakeRun) -> None:
    assert all(each.identical for each in await replayed(await make_run("run", "of_lists")))


async def test_a_damaged_and_a_foreign_run_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run = await make_run("run", "digit")
    batch = run / "batches" / "step-000001.parquet"
    batch.write_bytes(batch.read_bytes()[:-40])
    stepwise = replay_run(run)
    assert (await anext(stepwise)).identical
    with pytest.raises(ConfigError, match=r"step-000001\.parquet"):
        await anext(stepwise)
    (tmp_path / "foreign").mkdir()
    with pytest.raises(ConfigError, match="is not a run directory"):
        await replayed(tmp_path / "foreign")


def test_the_command_prints_a_table_and_says_whether_it_is_identical(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = asyncio.run(make_run("run", "digit"))
    assert main(["replay", str(run), "--quiet"]) == 0
    assert capsys.readouterr().out == "3 steps: identical, byte for byte\n"
    changed = ["replay", str(run), "--quiet", "--set", "plugins.reward=replay_rewards:is_large"]
    assert main([*changed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is False
    assert found["totals"]["rewards_changed"] == sum(each["rewards_changed"] for each in found["steps"])
    assert main(changed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "reward", "changed", "kept", "in/out", "advantages", "trained", "tokens"]
    assert max(map(len, lines)) <= 80
    first = found["steps"][0]
    assert lines[1].split()[4] == f"{first['rewards_changed']}/{first['num_rollouts']}"
    assert main(["replay", str(run), "--step", "7", "--quiet"]) == 2
    assert capsys.readouterr().err == f"rollfeed: {run}: has no step 7; it has steps 0 to 2\n"
