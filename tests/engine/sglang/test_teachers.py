"""Servers of a teacher that fail, lie or hang."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from tests.engine.sglang.test_scoring import scores

from rollfeed.config.teacher import TeacherSettings
from rollfeed.engine import teachers
from rollfeed.engine.teachers import ServedTeacher
from rollfeed.errors import ConfigError, EngineError, EngineUnavailableError
from rollfeed.testing import CharTokenizer, sample_of
from rollfeed.testing.virtual_loop import run_in_virtual_time

SAMPLE = sample_of([33, 34], [35, 36, 37])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "_PAUSE_SECONDS", 0.0)


def teacher_at(*servers: Any, **changes: Any) -> ServedTeacher:
    settings = TeacherSettings(servers=tuple(server.address for server in servers), **changes)
    return ServedTeacher(settings, tokenizer=CharTokenizer(), context_length=1000)


async def test_a_server_that_has_gone_leaves_its_responses_to_the_others(scripted: Any) -> None:
    async with scripted(2) as servers:
        for server in servers:
            server.generate = scores(-1.5)
        async with teacher_at(*servers) as teacher:
            await servers[0].kill()
            told = await asyncio.gather(*(teacher.logprobs(SAMPLE) for _ in range(4)))
        assert [each.tolist() for each in told] == [[-1.5] * 3] * 4


async def test_when_all_have_gone_there_is_an_error_after_every_try(scripted: Any) -> None:
    async with scripted() as (server,), teacher_at(server, max_tries=2) as teacher:
        await server.kill()
        with pytest.raises(EngineUnavailableError, match=r"^teacher: http.*\(try 2\)"):
            await teacher.logprobs(SAMPLE)


def test_a_server_that_hangs_is_given_up(scripted: Any) -> None:
    async def main() -> None:
        async with scripted() as (server,), teacher_at(server, max_tries=1) as teacher:
            never = asyncio.Event()

            async def hang(request: web.Request) -> web.StreamResponse:
                await never.wait()
                return web.Response()

            server.generate = hang
            with pytest.raises(EngineUnavailableError, match=r"no answer within 60 s"):
                await teacher.logprobs(SAMPLE)

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda meta: meta.update(weight_version="5"), "scored by version 5, not 0"),
        (lambda meta: meta.pop("input_token_logprobs"), "does not score texts"),
        (lambda meta: meta["input_token_logprobs"].pop(), "scored other tokens than it was sent"),
        (lambda meta: meta["input_token_logprobs"][3].__setitem__(1, 99), "scored other tokens than it was sent"),
        (lambda meta: meta["input_token_logprobs"][3].__setitem__(0, None), "response token 1 has the log-prob.* nan"),
        (lambda meta: meta["input_token_logprobs"][3].__setitem__(0, 0.7), "response token 1 has the log-prob.* 0.7"),
        (
            lambda meta: meta["input_token_logprobs"][3].__setitem__(0, -1e9),
            "response token 1 has the log-prob.* -1000000",
        ),
    ],
)
async def test_what_is_no_score_of_the_sampled_tokens_is_an_error(spoil: Any, message: str, scripted: Any) -> None:
    async with scripted() as (server,), teacher_at(server, max_tries=1) as teacher:
        server.generate = scores(-1.0, spoil)
        with pytest.raises(EngineError, match=message):
            await teacher.logprobs(SAMPLE)


@pytest.mark.parametrize("body", [b'[{"rest": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]", b'[{"\xff": 1}]', b"[NaN]"])
async def test_what_is_no_json_is_an_error(body: bytes, scripted: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with scripted() as (server,), teacher_at(server, max_tries=1) as teacher:
        server.generate = answer
        with pytest.raises(EngineError, match="does not score texts"):
            await teacher.logprobs(SAMPLE)


async def test_no_more_responses_are_scored_at_once_than_the_settings_say(scripted: Any) -> None:
    async with (
        scripted() as (server,),
        teacher_at(server, concurrency=2) as teacher,
        aiohttp.ClientSession() as session,
    ):
        two, go, most = asyncio.Event(), asyncio.Event(), 0

        async def answer(request: web.Request) -> web.StreamResponse:
            nonlocal most
            most = max(most, server.running)
            if server.running == 2:
                two.set()
            async with asyncio.timeout(60):
                await go.wait()
            response: web.StreamResponse = await scores(-1.0)(request)
            return response

        server.generate = answer
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(teacher.logprobs(SAMPLE))
            async with asyncio.timeout(60):
                await two.wait()
                for _ in range(20):  # in which others would have come
                    await (await session.get(f"{server.address}/health")).read()
            go.set()
        assert most == 2


@pytest.mark.parametrize("by_route", [True, False])
async def test_tokenizers_are_compared_by_the_route_for_it_or_by_a_scored_text(by_route: bool, scripted: Any) -> None:
    shift = 0

    def ids_of(text: str) -> list[int]:
        return [int(each) + shift for each in CharTokenizer().encode(text, add_special_tokens=False)]

    async def tokenise(request: web.Request) -> web.StreamResponse:
        return web.json_response({"tokens": ids_of(json.loads(await request.read())["prompt"])})

    async def score(request: web.Request) -> web.StreamResponse:
        ids = ids_of(json.loads(await request.read())["text"])
        return web.json_response(
            {"text": "", "meta_info": {"input_token_logprobs": [[None, each, None] for each in ids]}}
        )

    async with scripted() as (server,):
        if by_route:
            server.answers["/tokenize"] = tokenise
        server.generate = score
        async with teacher_at(server):
            assert len(server.bodies("/tokenize")) == 1
        shift = 1
        with pytest.raises(EngineError, match="it makes other tokens of a text"):
            await teacher_at(server).__aenter__()


async def test_a_key_that_is_not_there_is_named_by_its_setting(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted() as (server,):
        with pytest.raises(ConfigError, match=r"teacher.api_key_env = 'NO_SUCH_KEY'"):
            teacher_at(server, api_key_env="NO_SUCH_KEY")
        monkeypatch.setenv("TEACHER_KEY", "secret")
        server.generate = scores(-1.0)
        async with teacher_at(server, api_key_env="TEACHER_KEY") as teacher:
            np.testing.assert_allclose(await teacher.logprobs(SAMPLE), -1.0)
