"""``rollfeed check --servers`` and the embedded engine behind HTTP agree."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rollfeed.app import load_model
from rollfeed.cli.asked_servers import ask_servers
from rollfeed.config import Settings


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
