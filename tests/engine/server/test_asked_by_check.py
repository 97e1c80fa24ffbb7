"""``rollfeed check --servers`` and the embedded engine behind HTTP agree."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rollfeed.app import load_model
from rollfeed.cli.asked_servers import ask_servers, ask_teacher
from rollfeed.config import Settings
from rollfeed.errors import EngineError


async def test_the_embedded_server_can_be_used(
    embedded_server: Callable[..., AbstractAsyncContextManager[str]], tiny_checkpoint: Path
) -> None:
    async with embedded_server() as address:
        engine = {"context_length": 256, "sglang": {"workers": [address]}}
        prompts = {"environments": [{"id": "core/reverse_text"}]}
        settings = Settings.model_validate({"engine": engine, "train": {}, "prompts": prompts})
        (answer,) = await asyncio.to_thread(ask_servers, settings, load_model(str(tiny_checkpoint)))
    assert answer.problems == ()
    assert "context of 256 tokens" in answer.told
    assert re.fullmatch(r"\d tokens? with logprobs", answer.told[-3])
    assert answer.told[-2:] == ("text as ours", "takes weights")


async def test_the_teacher_is_asked_for_scores_where_it_is_on_servers(
    embedded_server: Callable[..., AbstractAsyncContextManager[str]], tiny_checkpoint: Path
) -> None:
    def settings_of(*servers: str) -> Settings:
        teacher = {"servers": servers, "startup_timeout_seconds": 0.1} if servers else {"checkpoint": "x"}
        prompts = {"environments": [{"id": "core/reverse_text"}]}
        return Settings.model_validate({"engine": {"context_length": 255}, "prompts": prompts, "teacher": teacher})

    policy = load_model(str(tiny_checkpoint))
    async with embedded_server() as address:
        assert list(await asyncio.to_thread(ask_teacher, settings_of(address), policy)) == [address]
        with pytest.raises(EngineError, match=r"teacher\.servers: .*http://127\.0\.0\.1:9"):
            await asyncio.to_thread(ask_teacher, settings_of(address, "http://127.0.0.1:9"), policy)
    assert list(await asyncio.to_thread(ask_teacher, settings_of(), policy)) == []
