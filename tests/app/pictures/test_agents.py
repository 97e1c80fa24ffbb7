"""Agents that show pictures through the gateway, with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.app.pictures.test_runs import TINY
from tests.engine.pictures.seeing import png, uri
from tests.integration.linting import findings_in

from rollfeed import app
from rollfeed.config import RunSpec, validate_settings
from rollfeed.config.train import TrainSettings
from rollfeed.errors import PictureMismatchError
from rollfeed.store import RunReader
from rollfeed.training.trainer import Trainer
from rollfeed.types import SeenPicture

AGENTS = """
import base64
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

LATER = {later!r}

async def chat(task):
    async with AsyncOpenAI(base_url=task.openai_base_url, api_key=task.api_key, max_retries=0) as client:
        messages = list(task.messages)
        for shown in (LATER, None):
            said = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=3)
            part = {{"type": "image_url", "image_url": {{"url": shown}}}}
            told = {{"role": "user", "content": [part, {{"type": "text", "text": "?"}}]}}
            messages += [said.choices[0].message, told]

async def messages(task):
    async with AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key, max_retries=0) as client:
        (part, text) = task.messages[-1]["content"]
        data = part["image_url"]["url"].partition(",")[2]
        asked = [{{"role": "user", "content": [block(data), text]}}]
        for _ in range(2):
            said = await client.messages.create(model=task.model, messages=asked, max_tokens=3)
            result = {{"type": "tool_result", "tool_use_id": "a", "content": [block(LATER.partition(",")[2])]}}
            asked += [{{"role": "assistant", "content": said.content}}, {{"role": "user", "content": [result]}}]

def block(data):
    return {{"type": "image", "source": {{"type": "base64", "media_type": "image/png", "data": data}}}}
"""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], app.PreparedRun]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "agents.py").write_text(AGENTS.format(later=uri(png(2))))
    (tmp_path / "first.png").write_bytes(png(1))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "<image>red?", "label": "red", "image": "first.png"}))

    def make(agent: str) -> app.PreparedRun:
        tree = {
            "model": {"checkpoint": "tiny-vision", "tiny": TINY},
            "prompts": {"datasets": [{"path": "train.jsonl", "label_key": "label", "image_key": "image"}]},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 4},
            "sampling": {"rollout_max_response_len": 12},
            "agent": {"function": f"agents.py:{agent}"},
            "engine": {"context_length": 128, "num_slots": 4, "threads": 1},
            "reward": {"rm_type": "exact"},
        }
        return app.prepare(RunSpec(validate_settings(tree, where="test", overrides=()), (tmp_path,)))

    return make


@pytest.mark.parametrize("agent", ["chat", "messages"])
def test_what_an_agent_shows_is_trained_with_its_pixels(prepared, tmp_path: Path, agent: str) -> None:
    run, out = prepared(agent), tmp_path / "run"
    asyncio.run(app.run(run, out=out))
    with RunReader(out) as reader:
        batch = reader.batch(0)
    assert len(batch.samples) == 4
    assert {path.read_bytes() for path in (out / "pictures").iterdir()} == {png(1), png(2)}
    for sample in batch.samples:
        assert [picture.width for picture in sample.images] == [8, 8]
        assert sample.metadata["num_turns"] == 2
        first, second = run.model.pictures.locate(sample.token_ids, sample.images)
        assert first.end <= sample.prompt_length < second.start
        np.testing.assert_array_equal(sample.loss_mask[second.start - sample.prompt_length :][:16], 0.0)
    trainer = Trainer(
        run.model.checkpoint,
        settings=TrainSettings(device="cpu", threads=1, max_picture_mismatch_kl=1e-6),
        temperature=1.0,
        num_batches=1,
        max_response_length=64,
        pictures=run.model.pictures,
    )
    for sample, logprobs in zip(batch.samples, trainer.logprobs(batch.samples), strict=True):
        trained = sample.loss_mask == 1
        np.testing.assert_allclose(logprobs[trained], sample.logprobs[trained], atol=1e-4)
    assert findings_in(out) == []


def test_an_engine_that_sees_another_picture_of_an_agent_s_ends_the_run(prepared, tmp_path: Path) -> None:
    run = prepared("chat")
    look = run.engine.look

    async def looking_elsewhere(token_ids: Any, images: Any) -> Any:
        found = await look(token_ids, images)
        return found._replace(seen=tuple(SeenPicture("0" * 64, each.start, each.end) for each in found.seen))

    run.engine.look = looking_elsewhere
    with pytest.raises(PictureMismatchError, match="picture 1, data:: the engine has seen"):
        asyncio.run(app.run(run, out=tmp_path / "run"))
