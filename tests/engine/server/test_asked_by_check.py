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
    embedded_server: Callable[..., AbstractAsyncContextManager[str]],
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollfeed.cli.asked_servers._SECONDS", 60.0)

    def settings_of(*servers: str, seconds: float = 60.0) -> Settings:
        teacher = {"servers": servers, "startup_timeout_seconds": seconds} if servers else {"checkpoint": "x"}
        prompts = {"environments": [{"id": "core/reverse_text"}]}
        return Settings.model_validate({"engine": {"context_length": 255}, "prompts": prompts, "teacher": teacher})

    policy = load_model(str(tiny_checkpoint))
    async with embedded_server() as address:
        assert list(await asyncio.to_thread(ask_teacher, settings_of(address), policy)) == [address]
        # In this order: the other one may not have answered by then.
        absent = settings_of("http://127.0.0.1:9", address, seconds=0.1)
        with pytest.raises(EngineError, match=r"teacher\.servers: .*http://127\.0\.0\.1:9"):
            await asyncio.to_thread(ask_teacher, absent, policy)
    assert list(await asyncio.to_thread(ask_teacher, settings_of(), policy)) == []
