"""What ``rollfeed check --servers`` finds out about servers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollfeed.app import Model
from rollfeed.cli.asked_servers import ServerAnswer, ask_servers
from rollfeed.config import Settings
from rollfeed.engine.client import ServerEngine
from rollfeed.errors import ConfigError
from rollfeed.testing import CharTokenizer
from rollfeed.testing.virtual_loop import in_virtual_time

VLLMMaker = Callable[..., AbstractAsyncContextManager[Any]]
PROMPTS: dict[str, Any] = {"prompts": {"environments": [{"id": "core/reverse_text"}]}}
MODEL = Model(checkpoint=Path("letters"), tokenizer=CharTokenizer())


def settings_for(*addresses: str, **sampling: Any) -> Settings:
    servers = {"base_url": addresses, "control_timeout_seconds": 20.0}
    tree = {"engine": {"context_length": 1000, "openai": servers}, "sampling": sampling, "train": {}, **PROMPTS}
    return Settings.model_validate(tree)


async def ask(*addresses: str, **sampling: Any) -> list[ServerAnswer]:
    return await asyncio.to_thread(ask_servers, settings_for(*addresses, **sampling), MODEL)


async def test_a_server_that_can_be_used_says_what_it_is(vllm: VLLMMaker) -> None:
    async with vllm(weight_version="7") as server:
        (answer,) = await ask(server.address)
    assert answer.problems == ()
    assert answer.told[:4] == ("letters", "version 7", "context of 10000 tokens", "8 tokens with logprobs")
    assert answer.told[-1] == "takes weights"


async def test_each_server_says_what_is_wrong_with_it(vllm: VLLMMaker) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with vllm() as good, vllm(has_dev_routes=False) as plain, vllm(has_logprobs=False) as bare:
            answers = await ask(good.address, plain.address, bare.address, nobody)
    assert ["takes weights" in each.told for each in answers] == [True, False, False, False]
    problems = [each.problems for each in answers]
    assert problems[0] == ()
    assert problems[1] == (f"{plain.address}: has no /collective_rpc, by which new weights come (docs/engines.md)",)
    assert "returns no logprobs" in problems[2][0]
    assert problems[3][0].startswith(f"{nobody}/health: ")


async def test_another_tokenizer_is_found_out(vllm: VLLMMaker) -> None:
    async with vllm() as server:
        plain: Callable[[web.Request], Awaitable[web.StreamResponse]] = server.handle
        offset = 0

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.path != "/tokenize":
                return await plain(request)
            return web.json_response({"tokens": [ord(each) + offset for each in (await request.json())["prompt"]]})

        server.handle = handle
        assert (await ask(server.address))[0].problems == ()
        offset = 1
        assert "its tokens are not those of the tokenizer in letters" in (await ask(server.address))[0].problems[0]


async def test_logprobs_that_do_not_show_how_is_sampled_are_refused(vllm: VLLMMaker) -> None:
    async with vllm(logprobs_mode="raw") as server:
        (answer,) = await ask(server.address, rollout_temperature=0.7)
    assert "do not show temperature = 0.7" in answer.problems[0]


@pytest.mark.parametrize("engine", [{}, {"openai": {}, "launch": {}}])
def test_where_there_are_no_servers_yet_it_is_said(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--servers: "):
        ask_servers(Settings.model_validate({"engine": engine, **PROMPTS}), MODEL)


@in_virtual_time
async def test_who_waits_for_a_server_says_so(
    engine_at: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollfeed")
    starting = asyncio.create_task(engine_at("http://127.0.0.1:9", startup_timeout_seconds=16.0).__aenter__())
    while not starting.done() and "waiting" not in caplog.text:
        await asyncio.wait({starting}, timeout=0.01)
    starting.cancel()
    await asyncio.wait({starting})
    assert "s of startup_timeout_seconds = 16: http://127.0.0.1:9/health: " in caplog.text
