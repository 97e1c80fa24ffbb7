"""Servers that want a key: every request carries it, a wrong one is told at once, and nobody else sees it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfeed import app
from rollfeed.config import EngineSettings
from rollfeed.errors import ConfigError, EngineProtocolError
from rollfeed.testing.fake_sglang import serve_fake_sglang
from rollfeed.testing.virtual_loop import in_virtual_time
from rollfeed.types import FolderUpdate

KEY, VARIABLE = "secret-7", "ROLLFEED_TEST_KEY"
PROMPT = np.array([97, 98, 99], np.int32)
UNNAMED = r"HTTP {}: name the variable that holds the key as engine\.sglang\.api_key_env"


@pytest.fixture
def key_variable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, KEY)
    return VARIABLE


@pytest.mark.parametrize("router", [None, "old", "new"])
async def test_every_request_carries_the_key(
    key_variable: str, engine_at: Any, asked: Any, until: Any, tmp_path: Path, router: str | None
) -> None:
    async with serve_fake_sglang(mode="zero", num_workers=2, router=router, api_key=KEY) as fakes:
        place = {"router": fakes.address, "workers": ()} if router else {"workers": fakes.addresses}
        async with engine_at(api_key_env=key_variable, **place) as engine:
            completion = await engine.generate(PROMPT, asked(4), request_id="a")
            assert len(completion.token_ids) == 4
            await engine.abort()
            await engine.pause()
            await engine.resume()
            await engine.apply(FolderUpdate(tmp_path, policy_version=1))
            await engine.load()
            await engine.health()
            probes = [(await fakes.stats(worker))["requests"]["/model_info"] for worker in range(2)]
            await until(
                lambda: all(s.num_requests["/model_info"] > p for s, p in zip(fakes.servers, probes, strict=True))
            )
            assert engine.metrics()["dead_workers"] == engine.metrics()["failed_aborts"] == 0
            assert engine.policy_version == 1
            assert KEY not in repr(engine._settings) + repr(vars(engine))


async def refuse(status: int, request: web.Request) -> web.Response:
    return web.json_response({"error": f"no: {request.headers.get('Authorization')}"}, status=status)


GUARDED = ("/health", "/workers", "/list_workers", "/model_info", "/server_info", "/v1/models", "/generate")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("first", GUARDED)
async def test_a_server_that_wants_a_key_is_told_of_at_once(
    scripted: Any, engine_at: Any, asked: Any, status: int, first: str
) -> None:
    async with scripted() as (server,):
        # What comes before is open, as health is on real servers.
        for path in GUARDED[GUARDED.index(first) :]:
            server.answers[path] = lambda request: refuse(status, request)
        with pytest.raises(EngineProtocolError, match=UNNAMED.format(status)):
            async with engine_at(server, startup_timeout_seconds=3600.0, request_timeout_seconds=3600.0) as engine:
                await engine.generate(PROMPT, asked(), request_id="a")
        assert [path for path, _ in server.calls].count(first) == 1


async def test_a_router_that_wants_a_key_is_told_of_at_once(engine_at: Any) -> None:
    async with serve_fake_sglang(mode="zero", router="new", api_key=KEY) as fakes:
        with pytest.raises(EngineProtocolError, match=UNNAMED.format(401)):
            await engine_at(router=fakes.address, workers=(), startup_timeout_seconds=3600.0).__aenter__()


@in_virtual_time
async def test_a_key_that_is_refused_is_named_by_its_variable_and_not_shown(
    key_variable: str, scripted: Any, engine_at: Any, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with scripted() as (server,):
        server.answers["/generate"] = lambda request: refuse(403, request)
        async with engine_at(server, api_key_env=key_variable) as engine:
            with pytest.raises(EngineProtocolError) as caught:
                await engine.generate(PROMPT, asked(), request_id="a")
        assert str(caught.value).endswith(
            f"/generate: HTTP 403: the key in ${VARIABLE} was refused; engine.sglang.api_key_env names the variable"
        )
        refusals = [(400, "/generate", 60), (500, "/generate", 60), (400, "/abort_request", 60), (500, "/health", 5)]
        for status, path, patience in refusals:
            server.answers = {path: lambda request, status=status: refuse(status, request)}
            engine = engine_at(server, api_key_env=key_variable, max_tries=1, startup_timeout_seconds=patience)
            with pytest.raises(Exception, match=f"HTTP {status}") as caught:  # noqa: PT012 - the way there may raise
                async with engine:
                    await engine.generate(PROMPT, asked(), request_id="a")
                assert "HTTP 400: no: Bearer <key>" in caplog.text
                raise EngineProtocolError("HTTP 400")
            assert KEY not in str(caught.value) + caplog.text


@pytest.mark.parametrize("value", [None, "", "  ", "line\nbreak", "schlüssel"])
def test_a_variable_without_a_key_is_a_mistake(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    model = app.load_model(str(tiny_checkpoint))
    table = {"workers": ["http://a:1"], "api_key_env": VARIABLE}
    with pytest.raises(ConfigError, match=rf"engine\.sglang\.api_key_env = '{VARIABLE}': the environment has no key"):
        app.build_engine(model, EngineSettings.model_validate({"sglang": table}))


async def test_a_worker_that_wants_a_key_later_is_taken_out(scripted: Any, engine_at: Any, until: Any) -> None:
    async with scripted(2) as servers, engine_at(*servers, probe_interval_seconds=0.01) as engine:
        servers[0].answers["/health"] = lambda request: refuse(401, request)
        await until(lambda: engine.metrics()["live_workers"] == 1)
        servers[0].answers.clear()
        await until(lambda: engine.metrics()["live_workers"] == 2)
        await asyncio.sleep(0)
