from __future__ import annotations

import logging

import pytest

from rollfeed.app import open_rollouts
from rollfeed.config import RolloutConfig
from rollfeed.testing import CharTokenizer, ListSource, ScriptedEngine, ScriptedRequest


async def warnings_of(caplog: pytest.LogCaptureFixture, answer: str, *, steps: int, rm_type: str) -> list[str]:
    def script(request: ScriptedRequest) -> str:
        return answer

    source = ListSource(["one", "two"], labels=["4", "5"], repeat=True)
    config = RolloutConfig(rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2}, reward={"rm_type": rm_type})
    rollouts = open_rollouts(config, source=source, engine=ScriptedEngine(answer=script), tokenizer=CharTokenizer())
    with caplog.at_level(logging.WARNING, logger="rollfeed"):
        async with rollouts:
            for _ in range(steps):
                await rollouts.generate_batch()
    return [record.getMessage() for record in caplog.records]


async def test_step_without_any_marker_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    messages = await warnings_of(caplog, r"\boxed{4}", steps=2, rm_type="deepscaler")
    assert [message.partition(":")[0] for message in messages] == ["step 0", "step 1"]
    assert "none of the 4 responses has </think> or ###Response" in messages[0]


async def test_steps_with_a_marker_or_another_grader_are_not(caplog: pytest.LogCaptureFixture) -> None:
    assert await warnings_of(caplog, r"</think>\boxed{4}", steps=1, rm_type="deepscaler") == []
    assert await warnings_of(caplog, r"\boxed{4}", steps=1, rm_type="math") == []
