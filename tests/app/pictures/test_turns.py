"""Pictures that an environment shows in the middle of an episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.app.pictures.test_runs import TINY
from tests.engine.pictures.seeing import png, uri

from rollfeed import app
from rollfeed.config import RunSpec, validate_settings
from rollfeed.store import RunReader
from rollfeed.types import FinishKind, FinishReason, VersionSpan

ASCII = "".join(map(chr, (10, *range(32, 127))))
ALBUM = """
from rollfeed.protocols import EnvironmentStep
from rollfeed.types import Correct, Verdict

SHOWN = {shown!r}

class Album:
    environment_id, version, summary, max_level = "test/album", 1, "shows a picture a turn", 0

    def make(self, level, random):
        return "red?", {{"number": random.random()}}, None

    def verify(self, params, response):
        return Verdict(reward=0.0, correct=Correct.NO)

    def start(self, params):
        return {{"turn": 0}}

    def step(self, state, response):
        if state["turn"] == 2:
            return EnvironmentStep(verdict=Verdict(reward=1.0, correct=Correct.YES))
        part = {{"type": "image_url", "image_url": {{"url": SHOWN[state["turn"]]}}}}
        told = {{"role": "user", "content": [part, {{"type": "text", "text": "green?"}}]}}
        return EnvironmentStep(state={{"turn": state["turn"] + 1}}, messages=(told,))

    def give_up(self, state):
        return Verdict(reward=0.0, correct=Correct.NO)
"""


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_turn_shows_a_picture_that_the_policy_sees_from_then_on(tmp_path: Path, monkeypatch, is_chat: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "album.py").write_text(ALBUM.format(shown=[uri(png(1)), uri(png(2))]))
    tree = {
        "model": {"checkpoint": "tiny-vision", "tiny": TINY},
        "prompts": {"environments": [{"id": "album.py:Album", "apply_chat_template": is_chat}]},
        "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
        "sampling": {"rollout_max_response_len": 100, "rollout_stop": ["#"]},
        "engine": {"context_length": 160, "num_slots": 2, "threads": 1},
    }
    prepared = app.prepare(RunSpec(validate_settings(tree, where="test", overrides=()), (tmp_path,)))
    engine, seen = prepared.engine, []
    generate = engine.generate

    async def watched(token_ids, params, *, request_id, images=()):
        """Two tokens a turn, so that episodes get to their end."""
        shorter = type(params)(max_new_tokens=2, seed=params.seed)
        completion = await generate(token_ids, shorter, request_id=request_id, images=images)
        assert prepared.model.pictures.locate(token_ids, images) == tuple(
            (each.start, each.end) for each in completion.seen_pictures or ()
        )
        seen.append(len(images))
        return replace(completion, finish_reason=FinishReason(FinishKind.STOP, "#"))

    prepared.engine.generate = watched
    monkeypatch.setattr("rollfeed.completions.check_finish", lambda *a, **k: None)
    asyncio.run(app.run(prepared, out=tmp_path / "run"))
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    with RunReader(tmp_path / "run") as reader:
        samples = reader.batch(0).samples
    for sample in samples:
        assert [len(sample.images), sample.reward] == [2, 1.0]
        places = prepared.model.pictures.locate(sample.token_ids, sample.images)
        inserted = sample.loss_mask[[place.start - sample.prompt_length for place in places]]
        np.testing.assert_array_equal(inserted, 0.0)
    assert len(list((tmp_path / "run" / "pictures").iterdir())) == 2


LOOK = """
def look(where: str) -> list:
    "Look somewhere."
    return [{{"type": "text", "text": "there"}}, {{"type": "image", "image": {shown!r}}}]
"""
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "up"}}\n</tool_call>'


def test_a_tool_shows_a_picture_that_the_policy_sees_from_then_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "looks.py").write_text(LOOK.format(shown=uri(png(1))))
    (tmp_path / "train.jsonl").write_text('{"prompt": "red?", "label": "red"}\n')
    dataset = {"path": "train.jsonl", "label_key": "label", "apply_chat_template": False}
    tree = {
        "model": {"checkpoint": "tiny-vision", "tiny": TINY | {"characters": ASCII}},
        "prompts": {"datasets": [dataset]},
        "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1},
        "sampling": {"rollout_max_response_len": 300},
        "engine": {"context_length": 1000, "num_slots": 2, "threads": 1},
        "reward": {"rm_type": "exact"},
        "tools": {"use": ["looks.py:look"]},
    }
    prepared = app.prepare(RunSpec(validate_settings(tree, where="test", overrides=()), (tmp_path,)))
    generate, tokenizer, seen = prepared.engine.generate, prepared.model.tokenizer, []

    async def speaking(token_ids, params, *, request_id, images=()):
        """What the engine says of its pictures, and a call in place of what it samples."""
        completion = await generate(token_ids, params, request_id=request_id, images=images)
        seen.append([each.content_hash for each in completion.seen_pictures or ()])
        said = tokenizer.encode(CALL if len(seen) == 1 else "red", add_special_tokens=False)
        return replace(
            completion,
            token_ids=said,
            logprobs=np.full(len(said), -1.0, np.float32),
            text=tokenizer.decode(said, skip_special_tokens=False),
            version_spans=(VersionSpan(0, len(said), 0),),
            finish_reason=FinishReason(FinishKind.STOP, int(said[-1])),
        )

    prepared.engine.generate = speaking
    asyncio.run(app.run(prepared, out=tmp_path / "run"))
    with RunReader(tmp_path / "run") as reader:
        (sample,) = reader.batch(0).samples
    assert seen == [[], [each.content_hash for each in sample.images]]
    about = sample.metadata
    assert (about["num_tool_calls"], about["num_failed_tool_calls"], sample.response) == (1, 0, "red")
    assert (tmp_path / "run" / "pictures" / f"{sample.images[0].content_hash}.png").read_bytes() == png(1)
