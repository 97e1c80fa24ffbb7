"""Every kind of plug-in against everything that it may do wrong: one line with setting, function, file and line."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SETTINGS = """
[model]
checkpoint = "{checkpoint}"

[rollout]
num_rollout = 2
rollout_batch_size = 2
n_samples_per_prompt = 2
over_sampling_batch_size = 16
{rollout}

[sampling]
rollout_max_response_len = 2

[engine]
threads = 1
num_slots = 32
context_length = 256
"""
DATA = """
[[prompts.datasets]]
path = "prompts.jsonl"
"""
ADAPTIVE = """
[prompts.adaptive]
environment_list = ["core/copy_text"]
"""
HEAD = """
import asyncio, os, time
from dataclasses import replace
from rollfeed.protocols import PromptSource
from rollfeed.types import Keep, Rollout, SampleStatus, Trained
{at_import}
def score(sample, prompt):
    return float(sample.index % 2)
def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    raise ValueError("told")
"""
GOOD = 'reward = "wrong:score"\n'


class Kind(NamedTuple):
    """A kind of plug-in, as text with a place for what it does wrong."""

    text: str
    """The last function is called ``f`` and holds ``{body}``."""
    settings: str
    """Where it is named, with ``{path}``."""
    named: str
    """The setting, as errors have it."""
    prompts: str = DATA
    rollout: str = ""
    fails_rollouts: bool = False
    """Whether the run ends when the failure budget is spent."""
    row: str = '{"prompt": "2 + 2?"}'
    """Of the data set."""
    command: str = "run"
    pending: str | None = None
    """An expression whose value has a sample that is not done, where that can be returned."""


KINDS = {
    "prompt_source": Kind(
        "class f(PromptSource):\n    def __init__(self, tokenizer):\n        pass\n    async def draw(self, count):\n"
        "        {body}\n    def state_dict(self):\n        return {{}}\n"
        "    def load_state_dict(self, state):\n        pass",
        f'[plugins]\n{GOOD}prompt_source = "{{path}}"',
        "plugins.prompt_source",
        prompts="",
    ),
    "generate": Kind(
        "async def f(request, *, services):\n    {body}",
        f'[plugins]\n{GOOD}generate = "{{path}}"',
        "plugins.generate",
        fails_rollouts=True,
        pending="[replace(s, status=SampleStatus.PENDING) for s in await services.default(request, services=services)]",
    ),
    "rollout": Kind(
        "async def f(context):\n    {body}",
        f'[plugins]\n{GOOD}rollout = "{{path}}"',
        "plugins.rollout",
    ),
    "reward": Kind(
        "async def f(sample, prompt):\n    {body}",
        '[plugins]\nreward = "{path}"',
        "plugins.reward",
        fails_rollouts=True,
    ),
    "plain_reward": Kind(
        "def f(sample, prompt):\n    {body}", '[plugins]\nreward = "{path}"', "plugins.reward", fails_rollouts=True
    ),
    "named_reward": Kind(
        "def f(sample, prompt):\n    {body}",
        '[reward]\nrm_type = "random"\n[reward.functions]\nmine = "{path}"',
        "reward.functions.mine",
        fails_rollouts=True,
        prompts=f'{DATA}metadata_key = "metadata"\n',
        row='{"prompt": "2 + 2?", "metadata": {"reward_fn": "mine"}}',
    ),
    "batched_reward": Kind(
        "async def f(samples, prompts):\n    {body}",
        '[plugins]\nbatched_reward = "{path}"',
        "plugins.batched_reward",
        fails_rollouts=True,
    ),
    "group_reward": Kind(
        "async def f(samples, prompt):\n    {body}",
        '[plugins]\ngroup_reward = "{path}"',
        "plugins.group_reward",
        fails_rollouts=True,
    ),
    "group_filters": Kind(
        "def f(samples):\n    {body}", f'[plugins]\n{GOOD}group_filters = ["{{path}}"]', "plugins.group_filters"
    ),
    "batch_filter": Kind(
        "def f(groups):\n    {body}", f'[plugins]\n{GOOD}batch_filter = "{{path}}"', "plugins.batch_filter"
    ),
    "sample_hook": Kind(
        "def f(sample, prompt):\n    {body}",
        f'[plugins]\n{GOOD}sample_hook = "{{path}}"',
        "plugins.sample_hook",
        fails_rollouts=True,
        pending="replace(sample, status=SampleStatus.PENDING)",
    ),
    "advantage": Kind(
        "def f(rewards_G, *, group):\n    {body}", f'[plugins]\n{GOOD}advantage = "{{path}}"', "plugins.advantage"
    ),
    "loss": Kind(
        "def f(inputs):\n    {body}",
        f'[plugins]\n{GOOD}[train]\ndevice = "cpu"\n[train.loss]\nfunction = "{{path}}"',
        "train.loss.function",
        command="train",
    ),
    "buffer_policy": Kind(
        "def f(entries, count, *, policy_version):\n    {body}",
        f'[plugins]\n{GOOD}buffer_policy = "{{path}}"',
        "plugins.buffer_policy",
        rollout="deterministic = true",
    ),
    "difficulty_policy": Kind(
        "class f:\n    def __init__(self, level, window):\n        self.level = level\n    def weights(self):\n"
        "        {body}\n    def observe(self, outcome):\n        pass\n"
        "    def end_step(self, *, max_level):\n        pass\n"
        "    def state_dict(self):\n        return {{}}\n    def load_state_dict(self, state):\n        pass",
        '[plugins]\ndifficulty_policy = "{path}"',
        "plugins.difficulty_policy",
        prompts=ADAPTIVE,
    ),
    "agent": Kind(
        "async def f(task):\n    {body}",
        f'[plugins]\n{GOOD}[agent]\nfunction = "{{path}}"',
        "agent.function",
        fails_rollouts=True,
    ),
    "slime_generate": Kind(
        "async def f(args, sample, sampling_params):\n    {body}",
        f'[plugins]\n{GOOD}generate = "slime:wrong.f"',
        "plugins.generate",
        fails_rollouts=True,
    ),
    "slime_reward": Kind(
        "async def f(args, sample, **kwargs):\n    {body}",
        '[plugins]\nreward = "slime:wrong.f"',
        "plugins.reward",
        fails_rollouts=True,
    ),
    "slime_filter": Kind(
        "def f(args, samples, **kwargs):\n    {body}",
        f'[plugins]\n{GOOD}group_filters = ["slime:wrong.f"]',
        "plugins.group_filters",
    ),
}
WRONG = {
    "raises": 'raise ValueError("broken")',
    "exits": "raise SystemExit(0)",
    "cancels": "raise asyncio.CancelledError",
    "interrupts": "raise KeyboardInterrupt",
    "returns None": "return None",
    "returns text": 'return "nonsense"',
    "returns NaN": 'return float("nan")',
    "returns pending": "return {pending}",
}
IMPORTS = {
    "exits": "raise SystemExit(0)",
    "raises": 'raise ValueError("broken")',
    "cancels": "raise asyncio.CancelledError",
}
OTHER_IMPORTS = ("raises", "cancels")


@pytest.fixture
def run(tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run with a plug-in in this process, and return exit code and standard error."""

    def make(kind: Kind, *, body: str = "pass", at_import: str = "") -> tuple[int, str]:
        from rollfeed.cli.main import main

        (tmp_path / "wrong.py").write_text(HEAD.format(at_import=at_import) + kind.text.format(body=body) + "\n")
        (tmp_path / "prompts.jsonl").write_text(f"{kind.row}\n" * 64)
        settings = SETTINGS.format(checkpoint=tiny_checkpoint, rollout=kind.rollout)
        (tmp_path / "run.toml").write_text(settings + kind.settings.format(path="wrong:f") + kind.prompts)
        sys.modules.pop("wrong", None)
        capfd.readouterr()
        code = main([kind.command, str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--quiet"])
        sys.modules.pop("wrong", None)
        return code, capfd.readouterr().err

    return make


def cases() -> list[Any]:
    """All of them; those of a diagonal are run always, the others in the soak."""
    found = []
    for row, (name, kind) in enumerate(KINDS.items()):
        for column, wrong in enumerate(WRONG):
            if wrong == "returns pending" and kind.pending is None:
                continue
            marks = () if row % len(WRONG) == column and row < len(WRONG) else (pytest.mark.soak,)
            found.append(pytest.param(name, wrong, marks=marks, id=f"{name} {wrong}"))
    return found


@pytest.mark.parametrize(("name", "wrong"), cases())
def test_x41_x42_what_a_plug_in_does_wrong_is_one_line(run: Any, name: str, wrong: str) -> None:
    kind = KINDS[name]
    body = WRONG[wrong].format(pending=kind.pending)
    code, error = run(kind, body=body)
    assert code == 1, error
    told = error.strip().splitlines()[-1]
    assert len(error.strip().splitlines()) == 1
    assert told.startswith("rollfeed: ")
    assert "Traceback" not in error
    assert kind.named in told
    assert "wrong" in told
    assert re.search(r"wrong\.py:\d+", told)
    if kind.fails_rollouts:
        assert "rollouts failed, more than rollout.failure_budget" in told


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("wrong", ["exits", *(pytest.param(each, marks=pytest.mark.soak) for each in OTHER_IMPORTS)])
def test_x41_a_plug_in_that_breaks_at_import_is_refused_before_the_run(run: Any, name: str, wrong: str) -> None:
    code, error = run(KINDS[name], at_import=IMPORTS[wrong])
    assert code == 2, error
    (told,) = error.strip().splitlines()
    assert told.startswith(f"rollfeed: {'plugins.' if 'score' in told else KINDS[name].named}")
    assert "importing it failed" in told
    assert "wrong.py:6" in told


BLOCKING = (
    "generate",
    "reward",
    "group_filters",
    "batch_filter",
    "sample_hook",
    "advantage",
    "prompt_source",
    "rollout",
)


@pytest.mark.parametrize(
    "name", [*BLOCKING[:2], *(pytest.param(name, marks=pytest.mark.soak) for name in BLOCKING[2:])]
)
def test_x42_a_plug_in_that_blocks_the_loop_is_named_with_its_line(run: Any, tmp_path: Path, name: str) -> None:
    told: list[str] = []

    class Listener(logging.Handler):
        """Lets the plug-in go on when it has been named."""

        def emit(self, record: logging.LogRecord) -> None:
            if "wrong.py" in record.getMessage():
                told.append(record.getMessage())
                (tmp_path / "told").touch()

    kind, listener = KINDS[name], Listener()
    kind = kind._replace(rollout=f"{kind.rollout}\nwatchdog_seconds = 0.05")
    log = logging.getLogger("rollfeed.pipeline.watchdog")
    log.addHandler(listener)
    try:
        code, error = run(kind, body=f"until({str(tmp_path / 'told')!r})")
    finally:
        log.removeHandler(listener)
    assert code == 1
    assert "ValueError: told" in error
    assert re.search(r"^for \d+ s nothing else has run.*wrong\.py:\d+, in \w+ holds up the event loop", told[0])
