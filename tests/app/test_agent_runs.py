"""Runs whose prompts are answered by an agent that speaks to an API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollfeed.app import prepare, run
from rollfeed.config import RunSpec, Settings
from rollfeed.config.load import validate_settings
from rollfeed.errors import ConfigError

AGENT = """
import json, urllib.request

def ask(url, key, messages):
    body = json.dumps({"messages": messages, "max_tokens": 3}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def play(task):
    if "fail" in task.text:
        raise ValueError("cannot do it")
    messages = list(task.messages)
    messages.append({"role": "assistant", "content": ask(task.openai_base_url, task.api_key, messages)})
    ask(task.openai_base_url, task.api_key, [*messages, {"role": "user", "content": "sure?"}])

def score(sample, prompt):
    return float(sample.metadata["num_turns"])
"""


def settings_for(checkpoint: Path, folder: Path, *questions: str, **agent: object) -> Settings:
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": each}) + "\n" for each in questions))
    return validate_settings(
        {
            "model": {"checkpoint": str(checkpoint)},
            "prompts": {"datasets": [{"path": "tasks.jsonl", "input_key": "q"}]},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "failure_minimum": 9},
            "sampling": {"rollout_max_response_len": 20},
            "engine": {"threads": 1, "num_slots": 4, "context_length": 256},
            "agent": {"function": "agent.py:play", **agent},
            "plugins": {"reward": "agent.py:score"},
        },
        where="test",
    )


async def test_a_run_trains_what_its_agent_was_answered(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, "add")
    summary = await run(prepare(RunSpec(settings, (tmp_path,))), out=tmp_path / "run")
    assert summary.num_steps == 1
    (metrics,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["rollout/turns_mean"] == 2.0
    assert metrics["rollout/reward_mean"] == 2.0


async def test_an_agent_that_fails_on_a_prompt_fails_nothing_else(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = settings_for(tiny_checkpoint, tmp_path, "fail", "add")
    summary = await run(prepare(RunSpec(settings, (tmp_path,))), out=tmp_path / "run")
    assert summary.num_steps == 1


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"function": "agent.py:nobody"}, "agent.function"),
        ({"function": None, "command": ["no-such-program"]}, "there is no such program"),
        ({"command": ["python"]}, "function or a command"),
        ({"function": None, "max_turns": 3}, "there is no agent"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused_before_the_run(
    agent: dict[str, object], message: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(RunSpec(settings_for(tiny_checkpoint, tmp_path, "add", **agent), (tmp_path,)))
