"""Runs with tools: prompts of all kinds have them, and whatever one does leaves the rest of the run untouched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollfeed import RolloutConfig, open_rollouts
from rollfeed.app import load_functions
from rollfeed.app.evaluation import prepare_evaluation
from rollfeed.app.sources import build_source
from rollfeed.config import EvalSettings, Settings
from rollfeed.environments import EnvironmentRegistry, EnvironmentSource
from rollfeed.errors import ConfigError
from rollfeed.prompts import ChatRenderer
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.testing.scripted import ScriptedRequest
from rollfeed.types import SampleStatus

TOOLS = '''
import asyncio, os, time

async def hangs() -> str:
    await asyncio.Event().wait()

async def deaf() -> str:
    """Does not let itself be cancelled, for a while."""
    for _ in range(15):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass

async def raises() -> str:
    raise ValueError("no")

async def floods() -> str:
    return "a" * 3_000_000

async def binary() -> bytes:
    return b"\\xff\\x00"

def dies() -> str:
    os._exit(1)

def sleeps() -> str:
    time.sleep(60)

def adds(a: int, b: int) -> int:
    return a + b
'''
LATE = {name: f"error: {name} gave no answer within 0.5 s" for name in ("hangs", "deaf", "sleeps")}
IN_TIME = {
    "raises": "error: raises failed: ValueError: no",
    "floods": "2,999,900 characters are left out",
    "binary": "error: binary gave a bytes, which is no text",
    "dies": "error: dies failed",
    "adds": "tool: 7\n",
    "unknown": "error: there is no tool 'unknown'",
}


def call_first(request: ScriptedRequest, names: Sequence[str]) -> str:
    """Call the tools in turn; answer when they have answered."""
    said = CharTokenizer().decode(request.token_ids, skip_special_tokens=True)
    if "\ntool: " in said:
        return "7"
    name = names[int(request.request_id.rpartition("rollout")[2])]
    arguments = {"a": 3, "b": "4"} if name == "adds" else {}
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(("expected", "seconds"), [(LATE, 0.5), (IN_TIME, 60.0)])
async def test_tools_that_hang_raise_flood_or_die_leave_the_rest_of_the_run_untouched(
    tmp_path: Path, expected: dict[str, str], seconds: float
) -> None:
    names = list(expected)
    (tmp_path / "mine.py").write_text(TOOLS)
    config = RolloutConfig(
        rollout={"rollout_batch_size": 1, "n_samples_per_prompt": len(names)},
        sampling={"rollout_max_response_len": 20_000},
        tools={
            "use": [f"mine.py:{name}" for name in names if name != "unknown"],
            "timeout_seconds": seconds,
            "max_output_chars": 100,
        },
        reward={"workers": {"num_workers": 2}},
    )
    functions = load_functions(config, folders=[tmp_path])
    tools = functions.services.toolbox.definitions
    renderer = ChatRenderer(CharTokenizer(), rollout_max_prompt_len=None, tools=tools)
    source = EnvironmentSource(EnvironmentRegistry().get("core/add_numbers"), level=0, seed=0, renderer=renderer)
    async with open_rollouts(
        config,
        source=source,
        engine=ScriptedEngine(answer=partial(call_first, names=names)),
        tokenizer=CharTokenizer(),
        functions=functions,
    ) as rollouts:
        batch = await rollouts.generate_batch()
    assert len(batch.samples) == len(names)
    for sample in batch.samples:
        assert sample.status is SampleStatus.COMPLETED
        assert sample.metadata["num_turns"] == 2
        assert sample.reward is not None
        inserted = sample.response_token_ids[sample.loss_mask == 0.0]
        told = CharTokenizer().decode(inserted, skip_special_tokens=True)
        assert expected[names[sample.index]] in told
    assert batch.metrics["rollout/tool_calls_mean"] == 1.0
    num_failed = sum(each.startswith("error") for each in expected.values())
    assert batch.metrics["rollout/tool_calls_failed_mean"] == pytest.approx(num_failed / len(names))


def settings_of(tmp_path: Path, **others: Any) -> Settings:
    return Settings.model_validate(
        {
            "prompts": {
                "environments": [{"id": "core/add_numbers"}, {"id": "core/guess_number"}],
                "datasets": [{"path": str(tmp_path / "rows.jsonl"), "tools_key": "tools", "label_key": "label"}],
            },
            "reward": {"rm_type": "exact"},
            "engine": {"context_length": 8192},
            "tools": {"use": ["calculator"]},
            **others,
        }
    )


async def test_prompts_of_every_source_have_the_tools_of_the_run_or_their_own(tmp_path: Path) -> None:
    own = {"type": "function", "function": {"name": "calculator", "description": "mine"}}
    rows = [{"prompt": "first", "label": "1"}, {"prompt": "second", "label": "2", "tools": [own]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = settings_of(tmp_path)
    tools = load_functions(settings).services.toolbox.definitions
    source = build_source(settings, CharTokenizer(), tools=tools)
    prompts = await source.draw(12)
    assert len({prompt.source for prompt in prompts}) == 3
    for prompt in prompts:
        assert prompt.text.startswith("user: You can use these tools:")
        assert prompt.messages is not None
        assert prompt.messages[0]["content"].startswith("You can use these tools:")
        expected = [own] if "second" in prompt.text else list(tools)
        assert list(prompt.tools or ()) == expected
    (plain,) = await build_source(settings, CharTokenizer()).draw(1)
    assert plain.tools is None


def test_prompts_of_evaluations_have_the_tools_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}')
    settings = settings_of(tmp_path)
    prepared = prepare_evaluation(
        EvalSettings.model_validate({"num_prompts": 2, "environments": [{"id": "core/add_numbers"}]}),
        config=settings,
        tokenizer=CharTokenizer(),
        context_length=8192,
    )
    for prompt in prepared.sets[0].prompts:
        assert [each["function"]["name"] for each in prompt.tools or ()] == ["calculator"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"use": ["calculater"]}, "tools.use: there is no tool 'calculater'; did you mean calculator"),
        ({"use": ["search"]}, "set tools.search.corpus"),
        ({"use": ["calculator", "calculator"]}, "two tools are called 'calculator'"),
    ],
)
def test_a_tool_that_cannot_be_is_refused_before_anything_starts(tools: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_functions(RolloutConfig.model_validate({"tools": tools}))
