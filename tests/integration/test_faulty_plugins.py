"""A plug-in that breaks while a run goes on: one line, with its setting and its own line, and exit code 1."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGINS = """
import asyncio

from rollfeed.protocols import PromptSource
from rollfeed.types import Drop, Keep, Trained

async def generate(request, *, services):
    return {}["generate"]

async def generate_nothing(request, *, services):
    return []

async def rollout(context):
    await context.draw(1)
    raise ValueError("rollout")

async def rollout_of_one(context):
    (group,) = await context.draw(1)
    return [Trained(await context.submit(group))]

async def rollout_of_numbers(context):
    return [Trained(1), Trained(2)]

async def rollout_in_tasks(context):
    async def submit():
        raise ValueError("a task")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(submit())

async def reward(sample, prompt):
    return {}["reward"]

def plain_reward(sample, prompt):
    return {}["plain reward"]

async def batched_reward(samples, prompts):
    return {}["batched reward"]

async def group_reward(samples, prompt):
    return [1.0]

def good_reward(sample, prompt):
    return float(sample.index % 2)

def group_filter(samples):
    return {}["filter"]

def group_filter_bool(samples):
    return True

def sample_hook(sample, prompt):
    return {}["hook"]

def sample_hook_none(sample, prompt):
    return None

def advantage(rewards_G, *, group):
    return {}["advantage"]

def advantage_short(rewards_G, *, group):
    return rewards_G[:1]

def batch_filter(groups):
    return {}["batch filter"]

def batch_filter_of_one(groups):
    return [0]

def buffer_policy(entries, count, *, policy_version):
    return [len(entries)]

class Source(PromptSource):
    def __init__(self, tokenizer):
        pass
    async def draw(self, count):
        return ["a prompt"] * count
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

class LogTracker:
    def log(self, metrics, *, step):
        raise ValueError("log")
    def close(self):
        raise ValueError("close")

class CloseTracker:
    def log(self, metrics, *, step):
        pass
    def close(self):
        raise ValueError("at the end")
"""
SETTINGS = """
[model]
checkpoint = "{checkpoint}"

[rollout]
num_rollout = 2
rollout_batch_size = 2
n_samples_per_prompt = 2
{rollout}

[sampling]
rollout_max_response_len = 4

[engine]
threads = 1
num_slots = 8
context_length = 256
{rest}
"""
PROMPTS = """
[[prompts.datasets]]
path = "prompts.jsonl"
"""


@pytest.fixture
def run(tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run with plug-ins in this process and return exit code and standard error."""

    def make(*, rollout: str = "", rest: str, prompts: str = PROMPTS, command: str = "run") -> tuple[int, str]:
        from rollfeed.cli.main import main

        (tmp_path / "faulty.py").write_text(PLUGINS)
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 2?"}\n' * 40)
        settings = SETTINGS.format(checkpoint=tiny_checkpoint, rollout=rollout, rest=rest) + prompts
        (tmp_path / "run.toml").write_text(settings)
        sys.modules.pop("faulty", None)
        capfd.readouterr()
        code = main([command, str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--quiet"])
        return code, capfd.readouterr().err

    return make


def place(text: str) -> str:
    number = next(number for number, line in enumerate(PLUGINS.splitlines(), 1) if text in line)
    return f"faulty.py:{number}"


@pytest.mark.parametrize(
    ("setting", "name", "said", "line"),
    [
        ("rollout", "rollout", "ValueError: rollout", 'raise ValueError("rollout")'),
        ("rollout", "rollout_in_tasks", "ValueError: a task", 'raise ValueError("a task")'),
        ("rollout", "rollout_of_one", "returned 1 groups; a batch has 2", "async def rollout_of_one"),
        ("rollout", "rollout_of_numbers", "AttributeError: 'int' object", "async def rollout_of_numbers"),
        ("advantage", "advantage", "KeyError: 'advantage'", '{}["advantage"]'),
        ("advantage", "advantage_short", "it must return one finite number a rollout or sample", "def advantage_short"),
        ("group_filters", "group_filter", "KeyError: 'filter'", '{}["filter"]'),
        ("group_filters", "group_filter_bool", "returned True; return Keep()", "def group_filter_bool"),
        ("prompt_source", "Source", "returned 2 of str; 2 prompts were asked for", "class Source"),
    ],
)
def test_a_plug_in_that_breaks_ends_the_run_in_one_line(run, setting: str, name: str, said: str, line: str) -> None:
    chosen = f'["faulty:{name}"]' if setting == "group_filters" else f'"faulty:{name}"'
    prompts = "" if setting == "prompt_source" else PROMPTS
    code, error = run(rest=f'[plugins]\nreward = "faulty:good_reward"\n{setting} = {chosen}\n', prompts=prompts)
    assert code == 1
    (told,) = error.splitlines()
    assert told.startswith(f"rollfeed: plugins.{setting} (faulty:{name})")
    assert said in told
    assert re.findall(r"faulty\.py:\d+", told) == [place(line)]


@pytest.mark.parametrize(
    ("setting", "name", "said", "line"),
    [
        ("reward", "reward", "reward error: plugins.reward (faulty:reward): KeyError: 'reward'", '{}["reward"]'),
        ("reward", "plain_reward", "plugins.reward (faulty:plain_reward): KeyError: 'plain", '{}["plain reward"]'),
        ("batched_reward", "batched_reward", "(faulty:batched_reward): KeyError: 'batched", '{}["batched reward"]'),
        ("group_reward", "group_reward", "(faulty:group_reward): it returned 1 results for", "async def group_reward"),
        ("generate", "generate", "plugins.generate (faulty:generate): KeyError: 'generate'", '{}["generate"]'),
        ("generate", "generate_nothing", "returned []; it must return a list", "async def generate_nothing"),
        ("sample_hook", "sample_hook", "plugins.sample_hook (faulty:sample_hook): KeyError: 'hook'", '{}["hook"]'),
        ("sample_hook", "sample_hook_none", "returned None; return the sample", "def sample_hook_none"),
    ],
)
def test_rollouts_that_all_fail_end_the_run_in_one_line_with_their_number(
    run, setting: str, name: str, said: str, line: str
) -> None:
    good = "" if setting.endswith("reward") else 'reward = "faulty:good_reward"\n'
    rest = f'[plugins]\n{good}{setting} = "faulty:{name}"\n'
    code, error = run(rollout="over_sampling_batch_size = 16", rest=rest)
    assert code == 1
    (told,) = error.splitlines()
    # More than the fewest may have failed by the time that the run is ended.
    found = re.match(r"rollfeed: (\d+) of the last \1 rollouts failed, more than rollout.failure_budget = 0.1", told)
    assert found is not None
    assert int(found[1]) >= 16
    assert said in told
    assert place(line) in told
    assert told.endswith(f"(and {int(found[1]) - 1} more like it)")


@pytest.mark.parametrize(
    ("name", "said", "line", "lost"),
    [
        ("LogTracker", "ValueError: log", 'raise ValueError("log")', ["2 of 2 records are not in it"]),
        ("CloseTracker", "ValueError: at the end", 'raise ValueError("at the end")', []),
    ],
)
def test_a_tracker_that_breaks_ends_no_run(run, name: str, said: str, line: str, lost: list[str]) -> None:
    code, error = run(rest=f'[plugins]\nreward = "faulty:good_reward"\ntracker = "faulty:{name}"\n')
    assert code == 0
    first, *counts = error.splitlines()
    assert first.startswith(f"plugins.tracker (faulty:{name}): {said} (")
    assert place(line) in first
    assert first.endswith("; the run goes on")
    assert [each.partition("): ")[2] for each in counts] == lost


@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        ("batch_filter", "KeyError: 'batch filter'", '{}["batch filter"]'),
        ("batch_filter_of_one", "returned 1 of 4 groups, and a batch has 2", "def batch_filter_of_one"),
    ],
)
def test_a_batch_filter_that_breaks_ends_the_run_in_one_line(run, name: str, said: str, line: str) -> None:
    rest = f'[plugins]\nreward = "faulty:good_reward"\nbatch_filter = "faulty:{name}"\n'
    code, error = run(rollout="over_sampling_batch_size = 4", rest=rest)
    assert code == 1
    (told,) = error.splitlines()
    assert told.startswith(f"rollfeed: plugins.batch_filter (faulty:{name})")
    assert said in told
    assert place(line) in told


def test_a_policy_of_the_buffer_that_breaks_ends_the_run_when_it_is_asked(run) -> None:
    rest = '[plugins]\nreward = "faulty:good_reward"\nbuffer_policy = "faulty:buffer_policy"\n'
    code, error = run(rollout="over_sampling_batch_size = 8\ndeterministic = true", rest=rest)
    assert code == 1
    (told,) = error.splitlines()
    assert "plugins.buffer_policy (faulty:buffer_policy) returned index " in told
    assert place("def buffer_policy") in told
