"""Rows verified by a resources server of NeMo-Gym: a stand-in, written after its documentation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web

from rollfeed.environments import EnvironmentGrader, EnvironmentRegistry
from rollfeed.environments.making import PooledTaskMaker, describe_environments
from rollfeed.errors import ConfigError, WorkerError
from rollfeed.protocols import Task
from rollfeed.types import Correct
from rollfeed.workers import WorkerPool

LIES = {
    "crash": "answered 500",
    "nan": "gave the reward nan",
    "null": "gave the reward None",
    "text": "gave the reward '1.0'",
    "list": "gave the reward",
    "large": "gave the reward 1000",
    "deep": "gave no reward: RecursionError",
}


def row(number: int, **asked: Any) -> dict[str, Any]:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": f"What is 2 * {number}?"}]
    return {"responses_create_params": {"input": messages, **asked}, "expected": 2 * number, "id": number}


class StandIn:
    url = ""

    async def verify(self, request: web.Request) -> web.Response:
        asked = await request.json()
        ((message,), params) = asked["response"]["output"], asked["responses_create_params"]
        assert params["input"][1]["role"] == "user"
        assert (message["type"], message["role"]) == ("message", "assistant")
        text = "".join(part["text"] for part in message["content"] if part["type"] == "output_text")
        if text == "crash":
            return web.json_response({"detail": "crashed"}, status=500)
        reward = float("nan") if text == "nan" else 1.0 if str(asked["expected"]) in text else 0.25
        if text == "deep":
            return web.Response(body=b'{"rest": ' + b"[" * 50_000 + b"]" * 50_000 + b', "reward": 1.0}')
        lies = {"null": None, "text": "1.0", "list": [1.0], "large": 10**400}
        return web.json_response({**asked, "reward": lies.get(text, reward)})


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    stand_in, app = StandIn(), web.Application()
    app.router.add_post("/verify", stand_in.verify)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stand_in
    await runner.cleanup()


async def test_the_server_gives_the_rewards(server: StandIn, workers: WorkerPool, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row(number)) for number in range(40)))
    parameters = {"url": server.url + "/", "path": str(rows)}
    (facts,) = await describe_environments([("nemo/doubles", parameters)], workers=workers)
    turns = asyncio.Semaphore(1)
    maker = PooledTaskMaker(
        facts, run_seed=1, parameters=parameters, workers=workers, turns=turns, deadline_seconds=30.0
    )
    async with maker:
        tasks: list[Task] = [await maker.make(level=0, index=index) for index in range(8)]
    assert len({task.question for task in tasks}) > 3
    number = tasks[0].params["row"]["id"]
    assert tasks[0].question == f"Be brief.\n\nWhat is 2 * {number}?"

    grader = EnvironmentGrader(EnvironmentRegistry(), workers=workers, deadline_seconds=30.0)
    metadata = {"environment": "nemo/doubles", "params": tasks[0].params}
    verdicts = [await grader(text, None, metadata) for text in (f"It is {2 * number}.", "no idea")]
    assert [(each.reward, each.correct) for each in verdicts] == [(1.0, Correct.YES), (0.25, Correct.NO)]
    lenient = {**metadata, "params": {**tasks[0].params, "right_at": 0.25}}
    assert (await grader("no idea", None, lenient)).correct is Correct.YES
    for text, message in LIES.items():
        with pytest.raises(WorkerError, match=message):
            await grader(text, None, metadata)
    gone = {"environment": "nemo/doubles", "params": {**tasks[0].params, "url": "http://127.0.0.1:9"}}
    with pytest.raises(WorkerError, match="gave no reward: URLError"):
        await grader("4", None, gone)


@pytest.mark.parametrize(
    ("rows", "url", "message"),
    [
        ([row(1, tools=[{"type": "function", "name": "add"}])], "http://localhost", "rows of one turn in text"),
        ([row(1, input=[{"role": "assistant", "content": "Hi"}])], "http://localhost", "rows of one turn in text"),
        ([], "http://localhost", "has no rows"),
        ([row(1)], "localhost", "must be http:// or https://"),
    ],
)
def test_rows_and_servers_that_do_not_fit_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], url: str, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    environment: Any = EnvironmentRegistry().get("nemo/doubles")
    with pytest.raises((ConfigError, ValueError), match=message):
        environment.with_parameters({"url": url, "path": str(path)}).make(0, Random(1))
    with pytest.raises(ConfigError, match="path is missing"):
        environment.with_parameters({"url": "http://localhost"}).make(0, Random(1))
