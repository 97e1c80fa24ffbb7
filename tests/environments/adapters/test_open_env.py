"""Episodes in servers of OpenEnv: a stand-in that speaks its websocket, and the package itself where it is installed.

``ROLLFEED_OPENENV_PYTHON`` names a Python that has the package ``openenv``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.generate.test_multi_turn import Echo

from rollfeed.environments import EnvironmentRegistry
from rollfeed.environments.making import PooledTaskMaker, describe_environments
from rollfeed.errors import ConfigError, RewardError
from rollfeed.generate import default_generate, multi_turn
from rollfeed.protocols import MULTI_TURN, ServedEnvironment, Services
from rollfeed.testing import CharTokenizer, make_request
from rollfeed.types import Completion, Correct, FinishKind, Prompt, Sample, SampleStatus
from rollfeed.workers import WorkerPool

PYTHON = os.environ.get("ROLLFEED_OPENENV_PYTHON", "")


class StandIn:
    """Tells a number, and takes its digits one by one: 0.5 for each that is right, the end after two turns."""

    def __init__(self) -> None:
        self.num_open = 0
        self.refused = asyncio.Event()
        self.seeds: list[int] = []
        self.max_open = 8
        self.dies_at = ""
        self.url = ""

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open >= self.max_open:
            self.refused.set()
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            return socket
        self.num_open += 1
        try:
            await self._talk(socket)
        finally:
            self.num_open -= 1
        return socket

    async def _talk(self, socket: web.WebSocketResponse) -> None:
        digits, num_steps = "", 0
        async for message in socket:
            asked = message.json()
            if asked["type"] == "reset":
                self.seeds.append(asked["data"]["seed"])
                digits = f"{self.seeds[-1] % 100:02d}"
                answer = {"observation": {"text": f"Say {digits}.", "metadata": {}}, "reward": None, "done": False}
            elif set(asked["data"]) != {"digit"}:
                await socket.send_json({"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no digit"}})
                continue
            elif len(asked["data"]["digit"]) > 1:  # it says the same
                await socket.send_str(asked["data"]["digit"])
                continue
            elif asked["data"]["digit"] == self.dies_at:
                await socket.close()
                return
            else:
                is_right = asked["data"]["digit"] == digits[num_steps]
                num_steps += 1
                observed = {"text": "right" if is_right else "wrong"}
                answer = {"observation": observed, "reward": 0.5 * is_right, "done": num_steps == 2}
            await socket.send_json({"type": "observation", "data": answer})


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    stand_in, app = StandIn(), web.Application()
    app.router.add_get("/ws", stand_in.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stand_in
    await runner.cleanup()


def digits(url: str, **parameters: Any) -> Any:
    environment: Any = EnvironmentRegistry().get("openenv/digits")
    return environment.with_parameters({"url": url, "action_key": "digit", **parameters})


def params_of(url: str, seed: int, **parameters: Any) -> dict[str, Any]:
    return {**digits(url, **parameters)._parameters, "seed": seed}


async def test_a_turn_is_an_action_and_an_episode_is_worth_its_rewards(server: StandIn) -> None:
    environment = digits(server.url)
    assert isinstance(environment, ServedEnvironment)
    question, params, answer = await asyncio.to_thread(environment.make, 0, Random(1))
    assert (question, answer) == (f"Say {params['seed'] % 100:02d}.", None)

    state = await environment.start(params_of(server.url, seed=1_234))
    assert server.seeds == [params["seed"], 1_234]
    step = await environment.step(state, "3")
    assert step.messages == ({"role": "user", "content": "right"},)
    assert (await environment.give_up(state)).reward == 0.5
    verdict = (await environment.step(state, "4")).verdict
    assert (verdict.reward, verdict.correct) == (1.0, Correct.YES)
    assert server.num_open == 1
    await environment.close(state)
    assert server.num_open == 0


async def test_an_episode_ends_after_so_many_turns_and_what_is_no_action_is_told(server: StandIn) -> None:
    environment = digits(server.url, action_key="", max_turns=5)
    state = await environment.start(params_of(server.url, seed=34, action_key="", max_turns=5))
    texts = ("3", "{", '{"digits": 3}', "[" * 100_000)
    told = [(await environment.step(state, text)).messages[0]["content"] for text in texts]
    assert all(each.startswith("That is no action: ") for each in told)
    assert "no digit" in told[2]
    verdict = (await environment.step(state, '{"digit": "3"}')).verdict
    assert (verdict.reward, verdict.correct) == (0.5, Correct.NO)
    await environment.close(state)


@pytest.mark.parametrize("said", ["no JSON", "[" * 100_000])
async def test_what_a_server_says_that_is_not_json_is_its_fault_and_no_action(server: StandIn, said: str) -> None:
    environment = digits(server.url)
    state = await environment.start(params_of(server.url, seed=34))
    with pytest.raises(RewardError, match="the server sent what is not JSON"):
        await environment.step(state, said)
    await environment.close(state)


async def test_an_episode_is_right_from_a_sum_of_rewards_on(server: StandIn) -> None:
    environment = digits(server.url)
    state = await environment.start(params_of(server.url, seed=34, right_at=0.5))
    assert (await environment.give_up(state)).correct is Correct.NO
    await environment.step(state, "3")
    assert (await environment.give_up(state)).correct is Correct.YES
    await environment.close(state)


async def play(url: str, turns: list[str], *, kinds: list[FinishKind] | None = None, seed: int = 34) -> Sample:
    tokenizer = CharTokenizer()
    prompt = Prompt(
        prompt_id="a",
        source="digits",
        text="Say it.",
        token_ids=tokenizer.encode("Say it.", add_special_tokens=False),
        metadata={"environment": "openenv/digits", "params": params_of(url, seed), MULTI_TURN: True},
    )
    sampled = [tokenizer.encode(turn, add_special_tokens=False).astype(np.int32) for turn in turns]
    endpoint, texts = Echo(sampled, kinds), iter(turns)
    generate = endpoint.generate

    async def say(*arguments: Any, **named: Any) -> Completion:
        return replace(await generate(*arguments, **named), text=next(texts))

    endpoint.generate = say  # type: ignore[method-assign]
    request = make_request(prompt, max_new_tokens=40, max_context_length=100)
    services = Services(
        endpoint=endpoint, tokenizer=tokenizer, default=default_generate, environments=EnvironmentRegistry()
    )
    (sample,) = await multi_turn(request, services=services)
    return sample


async def test_an_episode_goes_on_in_one_session_that_is_left_however_it_ends(server: StandIn) -> None:
    sample = await play(server.url, ["3", "9"])
    assert (sample.reward, sample.correct, sample.status) == (0.5, Correct.NO, SampleStatus.COMPLETED)
    assert sample.loss_mask.tolist() == [1.0, *[0.0] * len("right"), 1.0]
    aborted = await play(server.url, ["3", "4"], kinds=[FinishKind.STOP, FinishKind.ABORT])
    assert (aborted.reward, aborted.status) == (None, SampleStatus.ABORTED)
    cut = await play(server.url, ["3", "4"], kinds=[FinishKind.STOP, FinishKind.LENGTH])
    assert (cut.reward, cut.status) == (0.5, SampleStatus.TRUNCATED)
    assert server.seeds == [34, 34, 34]
    assert server.num_open == 0


async def test_a_server_that_dies_fails_the_rollout(server: StandIn) -> None:
    server.dies_at = "4"
    with pytest.raises(RewardError, match=r"openenv/digits: step raised .*the server closed the connection"):
        await play(server.url, ["3", "4"])
    with pytest.raises(RewardError, match="openenv/digits: start raised ClientConnectorError"):
        await play("http://127.0.0.1:9", ["3", "4"])


async def test_a_full_server_is_waited_for(server: StandIn) -> None:
    server.max_open = 0
    waiting = asyncio.create_task(play(server.url, ["3", "4"]))
    await server.refused.wait()
    server.max_open = 1
    assert (await waiting).reward == 1.0


async def test_problems_are_made_in_workers(server: StandIn) -> None:
    parameters = {"url": server.url, "question": "Digit by digit."}
    async with WorkerPool(num_workers=1) as workers:
        (facts,) = await describe_environments([("openenv/digits", parameters)], workers=workers)
        assert (facts.is_multi_turn, facts.max_level) == (True, 0)
        maker = PooledTaskMaker(
            facts,
            run_seed=5,
            parameters=parameters,
            workers=workers,
            turns=asyncio.Semaphore(1),
            deadline_seconds=30.0,
        )
        async with maker:
            task = await maker.make(level=0, index=0)
    assert task.question == f"Digit by digit.\n\nSay {task.params['seed'] % 100:02d}."


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"uri": "http://localhost"}, "no parameter 'uri'; did you mean url"),
        ({"max_turns": "3"}, "max_turns = '3': must be of int"),
        ({"url": "localhost:8000"}, "parameters.url = 'localhost:8000': must be http"),
        ({}, "parameters.url = ''"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(parameters: dict[str, Any], message: str) -> None:
    environment: Any = EnvironmentRegistry().get("openenv/digits")
    with pytest.raises(ConfigError, match=message):
        environment.with_parameters(parameters).make(0, Random(1))


@pytest.fixture
def real_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    process = subprocess.Popen([PYTHON, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.soak
@pytest.mark.skipif(not PYTHON, reason="ROLLFEED_OPENENV_PYTHON names no Python with openenv")
async def test_a_server_of_the_package_is_spoken_to(real_server: str) -> None:
    echo: Any = EnvironmentRegistry().get("openenv/echo")
    echo = echo.with_parameters({"url": real_server, "observation_key": "echoed_message", "max_turns": 3})
    question, params, _ = await asyncio.to_thread(echo.make, 0, Random(1))
    assert question == "Echo environment ready!"
    states = [await echo.start(params) for _ in range(2)]
    waiting = asyncio.create_task(echo.start(params))  # the server has room for two
    step = await echo.step(states[0], "Hello")
    assert step.messages[0]["content"] == "Hello"
    assert (await echo.step(states[0], "stop")).verdict.reward == pytest.approx(0.9)
    assert not waiting.done()
    await echo.close(states[0])
    step = await echo.step(await waiting, "ab")
    assert step.messages[0]["content"] == "ab"
    for state in (states[1], waiting.result()):
        await echo.close(state)
