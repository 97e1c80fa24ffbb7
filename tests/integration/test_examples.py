"""Every example runs, with the real model."""

import importlib.util
import json
import runpy
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.integration.linting import findings_in

from rollfeed.testing import (
    CharTokenizer,
    check_advantage,
    check_batch_filter,
    check_batched_reward,
    check_buffer_policy,
    check_generate,
    check_group_filter,
    check_group_reward,
    check_prompt_source,
    check_reward,
    check_rollout,
    check_sample_hook,
    check_tracker,
    make_prompt,
    make_sample,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def plugins():
    from rollfeed.plugins import import_object

    def load(name: str):
        return import_object(f"plugins:{name}", key="example", folders=[EXAMPLES / "plugins"])

    yield load
    sys.modules.pop("plugins", None)


@pytest.mark.model
def test_the_demo_keeps_groups_with_spread_and_shows_what_it_dropped(rollfeed, tmp_path: Path) -> None:
    ran = rollfeed("run", EXAMPLES / "demo" / "demo.toml", "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    shown = rollfeed("show", tmp_path / "run", "--json").json
    assert len(shown["steps"]) == 2
    kept = [group for step in shown["steps"] for group in step["groups"]]
    dropped = [group for step in shown["steps"] for group in step["dropped"]]
    assert len(kept) == 8
    assert all(len(set(group["rewards"])) > 1 for group in kept)
    assert len({group["source"] for group in kept + dropped}) >= 3
    assert dropped
    assert all(group["drop_reason"].startswith("zero_std") for group in dropped)
    assert "dropped group" in ran.out
    assert "zero_std" in ran.out
    assert findings_in(tmp_path / "run") == []


@pytest.mark.model
def test_word_problems_run_on_a_reward_function_of_their_own(rollfeed, tmp_path: Path) -> None:
    settings = EXAMPLES / "word_problems" / "word_problems.toml"
    fewer = ("--set", "rollout.num_rollout=1", "--set", "sampling.rollout_max_response_len=24")
    ran = rollfeed("run", settings, "--out", tmp_path / "run", "--json", *fewer)
    assert ran.code == 0, ran.err
    assert ran.json["ledger"]["trained"] == 4
    assert findings_in(tmp_path / "run") == []


def test_the_word_problems_are_sixty_at_least_and_all_different() -> None:
    lines = (EXAMPLES / "word_problems" / "problems.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines) >= 60


def test_the_word_problem_reward_is_what_it_says() -> None:
    from rollfeed.plugins import import_object

    closeness = import_object("rewards:closeness", key="example", folders=[EXAMPLES / "word_problems"])
    sys.modules.pop("rewards", None)
    prompt = make_prompt("7 + 1?", label="8")
    for response, reward in (("It is 8.", 1.0), ("7 + 1 = 9", 0.25), ("many", 0.0)):
        assert closeness(make_sample(response, prompt=prompt), prompt).reward == reward


@pytest.mark.model
def test_the_plug_in_example_runs(rollfeed, tmp_path: Path) -> None:
    ran = rollfeed("run", EXAMPLES / "plugins" / "plugins.toml", "--out", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["num_steps"] == 1
    assert '"reward"' in ran.err
    assert findings_in(tmp_path / "run") == []


@pytest.mark.model
def test_the_library_example_runs_without_a_settings_file(capsys) -> None:
    runpy.run_path(str(EXAMPLES / "library" / "library.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == 2 * 2 * 4


@pytest.mark.model
def test_the_two_turns_run_and_leave_no_journal(rollfeed, tmp_path: Path) -> None:
    ran = rollfeed("run", EXAMPLES / "turns" / "turns.toml", "--out", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["ledger"]["trained"] == 2
    assert not (tmp_path / "run" / "turns.log").exists()
    assert findings_in(tmp_path / "run") == []


@pytest.mark.model
@pytest.mark.parametrize(("example", "num_calls"), [("calculator-agent", 14), ("python-agent", 14)])
def test_the_agents_call_their_tool_and_only_what_they_sampled_is_trained(
    rollfeed, tmp_path: Path, example: str, num_calls: int
) -> None:
    fewer = ("--set", "rollout.num_rollout=1", "--set", "rollout.deterministic=true")
    checked = rollfeed("check", EXAMPLES / example / "run.toml", "--json").json
    assert (checked["tools"]["names"], checked["tools"]["call_format"]) == ([example.removesuffix("-agent")], "tags")
    ran = rollfeed("run", EXAMPLES / example / "run.toml", "--out", tmp_path / "run", "--json", *fewer)
    assert ran.code == 0, ran.err
    (step,) = (tmp_path / "run" / "batches").glob("*.parquet")
    rows = pq.read_table(step).to_pylist()
    about = [json.loads(row["metadata"]) for row in rows]
    assert sum(each["num_tool_calls"] - each["num_failed_tool_calls"] for each in about) >= num_calls
    assert sum(row["reward"] for row in rows) >= 12
    for row, each in zip(rows, about, strict=True):
        told = [logprob for logprob, weight in zip(row["logprobs"], row["loss_mask"], strict=True) if not weight]
        assert bool(told) is (each["num_turns"] > 1)
        assert set(told) <= {0.0}
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["rollout/tool_calls_mean"] > 0.8
    assert findings_in(tmp_path / "run") == []


@pytest.mark.model
def test_an_agent_asks_the_mcp_server_of_its_settings(rollfeed, tmp_path: Path) -> None:
    fewer = ("--set", "rollout.deterministic=true")
    ran = rollfeed("run", EXAMPLES / "mcp-server" / "run.toml", "--out", tmp_path / "run", "--json", *fewer)
    assert ran.code == 0, ran.err
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["rollout/tool_calls_mean"] > 0.3
    assert metrics["rollout/tool_calls_failed_mean"] == 0.0
    assert findings_in(tmp_path / "run") == []


@pytest.mark.model
@pytest.mark.parametrize(("example", "num_turns"), [("blackbox-openai", {1, 2, 3}), ("blackbox-anthropic", {2})])
def test_agents_that_know_nothing_of_rollfeed_are_trained_on_and_rewarded_by_an_environment(
    rollfeed, tmp_path: Path, example: str, num_turns: set[int]
) -> None:
    ran = rollfeed("run", EXAMPLES / example / "run.toml", "--out", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["ledger"]["trained"], ran.json["ledger"]["failed"]) == (2, 0)
    (step,) = (tmp_path / "run" / "batches").glob("*.parquet")
    rows = pq.read_table(step).to_pylist()
    assert {json.loads(row["metadata"])["num_turns"] for row in rows} <= num_turns
    assert all(any(row["loss_mask"]) for row in rows)
    assert any(row["reward"] > 0.0 for row in rows)
    linted = rollfeed("lint", tmp_path / "run", "--json")
    assert (linted.code, linted.json["findings"]) == (0, []), linted.out
    replayed = rollfeed("replay", tmp_path / "run", "--json")
    assert replayed.json["identical"], replayed.out


def test_the_game_is_warmed_up_and_trained_on_in_several_turns(rollfeed, tmp_path: Path) -> None:
    fewer = ("rollout.num_rollout=2", "rollout.rollout_batch_size=4", "train.warm_up.stop_accuracy=0.02")
    small = ("eval.n_samples_per_prompt=4", "train.warm_up.probe_prompts=32", "model.tiny.hidden_size=32")
    overrides = [word for each in (*fewer, *small) for word in ("--set", each)]
    ran = rollfeed("train", EXAMPLES / "guess-number" / "train.toml", "--out", tmp_path / "run", *overrides)
    assert ran.code == 0, ran.err
    assert "after 2 batches, core/guess_number@0: accuracy" in ran.out
    batches = sorted((tmp_path / "run" / "batches").glob("*.parquet"))
    rows = [row for path in batches for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 2 * 4 * 16
    assert any(0.0 in row["loss_mask"] for row in rows)
    assert findings_in(tmp_path / "run") == []


def test_the_tasks_that_adapt_are_trained_on_at_several_levels(rollfeed, tmp_path: Path) -> None:
    fewer = ("rollout.num_rollout=2", "rollout.rollout_batch_size=4", "rollout.n_samples_per_prompt=4")
    small = ("train.warm_up.stop_accuracy=0.01", "train.warm_up.wrong_share=0.0", "train.warm_up.probe_prompts=64")
    easy = ("prompts.adaptive.initial_difficulty=1", "eval.num_prompts=8")
    overrides = [word for each in (*fewer, *small, *easy) for word in ("--set", each)]
    ran = rollfeed("train", EXAMPLES / "adaptive" / "train.toml", "--out", tmp_path / "run", *overrides)
    assert ran.code == 0, ran.err
    batches = sorted((tmp_path / "run" / "batches").glob("*.parquet"))
    ids = {row["prompt_id"].partition("/train")[0] for path in batches for row in pq.read_table(path).to_pylist()}
    assert {each.partition("@")[0] for each in ids} == {"core/reverse_text", "core/sort_numbers"}
    assert len(ids) > 2
    assert findings_in(tmp_path / "run") == []


async def test_the_plug_in_examples_keep_their_contracts(plugins) -> None:
    await check_prompt_source(lambda: plugins("CountrySource")(CharTokenizer()))
    await check_generate(plugins("shorter_for_later_members"))
    await check_rollout(plugins("one_wave"))
    await check_reward(plugins("brevity"))
    await check_batched_reward(plugins("brevity_batched"))
    await check_group_reward(plugins("rank_by_length"))
    check_group_filter(plugins("distinct_answers"))
    check_batch_filter(plugins("least_alike"))
    check_buffer_policy(plugins("longest_first"))
    check_sample_hook(plugins("strip_response"))
    check_advantage(plugins("rank_advantages"))
    check_tracker(plugins("PrintTracker")())


async def test_the_loop_learns() -> None:
    spec = importlib.util.spec_from_file_location("loop_example", EXAMPLES / "loop.py")
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    assert len((EXAMPLES / "loop.py").read_text().splitlines()) <= 150
    rewards = await loop.train(20)
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4])


def test_the_words_are_learned_from_their_answers(rollfeed, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "sft" / "run.toml", tmp_path)
    write = runpy.run_path(str(EXAMPLES / "sft" / "write_words.py"))["write"]
    write(tmp_path / "words.jsonl", num_rows=64 * 3)
    sizes = ["rollout.num_rollout=3", "eval.num_prompts=20", "train.checkpoint_interval=1"]
    options = [option for each in sizes for option in ("--set", each)]
    result = rollfeed("train", tmp_path / "run.toml", "--out", tmp_path / "run", *options)
    assert result.code == 0, result.err
    losses = [json.loads(line)["train/loss"] for line in (tmp_path / "run/train.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert "after 3 batches, core/reverse_text@2: accuracy" in result.out
    assert findings_in(tmp_path / "run") == []


def test_launched_servers_go_behind_the_settings_of_a_training(rollfeed, tmp_path: Path) -> None:
    files = (EXAMPLES / "reverse" / "train.toml", EXAMPLES / "launch" / "vllm.toml")
    checked = rollfeed("check", *files, "--set", f'engine.launch.command=["{sys.executable}"]')
    assert checked.code == 0, checked.err
    missing = rollfeed("check", *files, "--set", 'engine.launch.command=["no-such-vllm"]')
    assert "engine.launch.command: there is no program 'no-such-vllm': install vLLM, or name" in missing.err
