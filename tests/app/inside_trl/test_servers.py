"""Trainers whose answers come from a server, over HTTP: it has their weights."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.app.inside_trl.trainers import ASYNC, GRPO, Rows, Trainer, logprobs_of

from rollfeed.base.loop_thread import LoopThread
from rollfeed.compat.trl import AsyncRollouts, RolloutFunc
from rollfeed.config import EngineSettings
from rollfeed.engine.local import create_local_engine
from rollfeed.engine.server import ServedModel, Service, serve
from rollfeed.errors import EngineUnavailableError
from rollfeed.prompts import load_tokenizer


@asynccontextmanager
async def served(checkpoint: Path) -> AsyncIterator[str]:
    tokenizer = load_tokenizer(checkpoint)
    engine = create_local_engine(
        checkpoint=checkpoint, tokenizer=tokenizer, threads=1, num_slots=8, context_length=128, deterministic=False
    )
    config = json.loads((checkpoint / "config.json").read_text())
    model = ServedModel(model_path=str(checkpoint), name="tiny", created=0, config=config, max_waiting=64)
    async with engine, serve(Service(engine, tokenizer=tokenizer, model=model), host="127.0.0.1", port=0) as address:
        yield address


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[EngineSettings]:
    loop, server = LoopThread("server"), served(tiny_checkpoint)
    address = loop.call(server.__aenter__())
    yield EngineSettings.model_validate({"context_length": 128, "sglang": {"workers": [address], "concurrency": 8}})
    loop.call(server.__aexit__(None, None, None))
    loop.close()


def change(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def test_the_plain_trainer_gives_a_server_its_weights(
    engine: EngineSettings, tiny_checkpoint: Path, chats: Rows
) -> None:
    trainer, function = Trainer(tiny_checkpoint, chats), RolloutFunc(engine=engine)
    try:
        for step in range(3):
            trainer.state.global_step = step
            answered = function([chats[step]["prompt"]] * 3, trainer)
            for ids, said, logprobs in zip(*(answered[name] for name in answered), strict=True):
                np.testing.assert_allclose(logprobs, trainer.logprobs(ids, said), atol=1e-4)
            change(trainer.model)
    finally:
        function.close()


def test_the_asynchronous_trainer_gives_a_server_its_weights(
    engine: EngineSettings, tiny_checkpoint: Path, chats: Rows
) -> None:
    args = SimpleNamespace(**{**GRPO, **ASYNC, "max_staleness": 0})
    rollouts = AsyncRollouts(
        tiny_checkpoint,
        args=args,
        train_dataset=chats,
        reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        engine=engine,
    )
    model = Trainer(tiny_checkpoint, chats).model
    try:
        rollouts.init_weight_transfer()
        for version in range(1, 4):
            rollouts.send_weights(model.named_parameters())
            rollouts.update_model_version(version)
            if version == 1:
                rollouts.start()
            samples = iter(lambda: rollouts.rollout_buffer.get(timeout=120.0), None)
            sample = next(sample for sample in samples if sample.model_version == version)
            ids, prompt_length = sample.input_ids.tolist(), int(np.argmax(sample.completion_mask))
            expected = logprobs_of(model, ids[:prompt_length], ids[prompt_length:], GRPO["temperature"])
            np.testing.assert_allclose(sample.old_log_probs[prompt_length:], expected, atol=1e-4)
            change(model)
    finally:
        rollouts.destroy()


def test_servers_that_are_not_there_leave_no_thread(tiny_checkpoint: Path, chats: Rows) -> None:
    away = {"workers": ["http://127.0.0.1:1"], "startup_timeout_seconds": 0.2}
    engine = EngineSettings.model_validate({"context_length": 128, "sglang": away})
    args = SimpleNamespace(**{**GRPO, **ASYNC})
    rollouts = AsyncRollouts(
        tiny_checkpoint, args=args, train_dataset=chats, reward_funcs=no_reward, engine=engine, label_key="label"
    )
    with pytest.raises(EngineUnavailableError, match="not there within startup_timeout_seconds"):
        rollouts.init_weight_transfer()
    rollouts.destroy()
    with pytest.raises(EngineUnavailableError, match="not there within startup_timeout_seconds"):
        RolloutFunc(engine=engine)([chats[0]["prompt"]] * 3, Trainer(tiny_checkpoint, chats))
    assert "rollfeed-trl" not in {thread.name for thread in threading.enumerate()}


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
