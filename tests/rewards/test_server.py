from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rollfeed.base.serving import serve_application
from rollfeed.config import RemoteRewardSettings
from rollfeed.errors import ConfigError
from rollfeed.rewards.calls import OwnPace
from rollfeed.rewards.hub import RewardHub
from rollfeed.rewards.over_http.remote import RemoteGrader
from rollfeed.rewards.over_http.server import RewardServer
from rollfeed.rewards.registry import BUILTIN_GRADERS
from rollfeed.types import Verdict

JSON = {"Content-Type": "application/json"}


class Client:
    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self.address = address
        self.headers: Mapping[str, str] = {}

    async def post(self, body: Any, *, path: str = "/") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(self.address + path, data=data, headers=JSON) as reply:
            self.headers = reply.headers
            return reply.status, await reply.json()

    async def get(self, path: str) -> str:
        async with self._session.get(self.address + path) as reply:
            assert reply.status == 200
            return await reply.text()


@asynccontextmanager
async def serving(
    *,
    rm_type: str | None = "math",
    allowed: tuple[str, ...] = ("exact", "dapo"),
    max_in_progress: int = 64,
    **graders: Any,
) -> AsyncIterator[Client]:
    hub = RewardHub(graders={**BUILTIN_GRADERS, **graders}, rm_type=rm_type, timeout_seconds=5.0)
    rm_types = [*filter(None, [rm_type]), *allowed, *graders]
    server = RewardServer(hub, rm_types=rm_types, max_in_progress=max_in_progress)
    async with (
        serve_application(server.application(), host="127.0.0.1", port=0) as address,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, address)


RIGHT, WRONG = {"response": r"\boxed{4}", "label": "4"}, {"response": r"\boxed{5}", "label": "4"}


@pytest.mark.parametrize("path", ["/", "/get_reward"])
async def test_response_gets_its_verdict(path: str) -> None:
    async with serving() as client:
        status, reply = await client.post({"prompt": "2 + 2", **RIGHT}, path=path)
        assert status == 200
        assert reply == {
            "reward": 1.0,
            "correct": "yes",
            "format_ok": True,
            "extracted": "4",
            "outcome": "ok",
            "detail": "",
            "step_scores": [],
        }


async def test_list_gets_a_list_in_order() -> None:
    async with serving() as client:
        _, reply = await client.post([RIGHT, WRONG, {**WRONG, "rm_type": "dapo"}])
        assert [one["reward"] for one in reply][:2] == [1.0, 0.0]
        assert len(reply) == 3


async def test_predictions_get_rewards() -> None:
    async with serving() as client:
        _, reply = await client.post({"predictions": [r"\boxed{4}", r"\boxed{5}"], "answers": ["4", "4"]})
        assert reply["reward"] == [1.0, 0.0]
        _, reply = await client.post({"predictions": r"\boxed{4}", "answers": "4"})
        assert reply["reward"] == 1.0


async def test_options_choose_grader_and_key() -> None:
    async def parts(response: str, label: Any, metadata: Any) -> Any:
        return {"a": 1.0, "b": 2.0}

    async with serving(parts=OwnPace(parts)) as client:
        body = {**RIGHT, "rm_type": "parts", "metadata": json.dumps({}), "reward_key": "b"}
        _, reply = await client.post(body)
        assert reply["reward"] == {"a": 1.0, "b": 2.0}
        _, reply = await client.post({**RIGHT, "metadata": {"rm_type": "exact"}})
        assert reply["outcome"] == "ok"


async def test_failed_grading_is_null_with_the_cause() -> None:
    async with serving() as client:
        for body in ({"response": None, "label": "4"}, {"response": "x"}, {**RIGHT, "metadata": "{"}):
            status, reply = await client.post(body)
            assert status == 200
            assert (reply["reward"], reply["outcome"]) == (None, "error")
            assert reply["detail"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (3, "the body is a int"),
        ([], "empty list"),
        ([3], "entry 0 is a int"),
        ({"label": "4"}, "the body has no response; it has label"),
        ([RIGHT, {}], "entry 1 has no response; it has nothing"),
        ({"predictions": ["a", "b"], "answers": ["a"]}, "lists of the same length"),
        ({"predictions": ["a"], "answers": "a"}, "lists of the same length"),
        ({"predictions": [], "answers": []}, "predictions is empty"),
        ({**RIGHT, "rm_type": "maths"}, "rm_type = 'maths': no such grader; did you mean math?"),
        ({**RIGHT, "metadata": {"rm_type": 3}}, "rm_type = 3: no such grader"),
        ([RIGHT, {**RIGHT, "rm_type": "maths"}], "response 1: rm_type = 'maths'"),
        ({**RIGHT, "reward_key": 3}, "reward_key is 3"),
        ({**RIGHT, "metadata": json.dumps(json.dumps({"rm_type": "livecodebench"}))}, "a text in a text"),
        ([RIGHT] * 65, "65 responses in a request; at most 64"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_request_that_is_wrong_is_told_why(body: Any, message: str) -> None:
    async with serving() as client:
        status, reply = await client.post(body)
        assert status == 400
        assert message in reply["error"]
        assert "rollfeed_reward_bad_requests_total 1.0" in await client.get("/metrics")


async def test_body_that_is_too_large_is_refused_and_counted() -> None:
    hub = RewardHub(graders=BUILTIN_GRADERS, rm_type="math", timeout_seconds=5.0)
    server = RewardServer(hub, rm_types=["math"], max_body_bytes=1_000)
    async with (
        serve_application(server.application(), host="127.0.0.1", port=0) as address,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, address)
        assert await client.post({**RIGHT, "prompt": "x" * 1_000}) == (
            413,
            {"error": "the body is larger than 1000 bytes"},
        )
        assert (await client.post(RIGHT))[1]["reward"] == 1.0
        assert "rollfeed_reward_bad_requests_total 1.0" in await client.get("/metrics")


async def test_bytes_that_are_not_http_do_not_disturb_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.address.rpartition(":")[2]))
        writer.write(b"\x16\x03\x01\x02\x00 no http\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert (await client.post(RIGHT))[1]["reward"] == 1.0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_client_that_goes_away_within_its_body_does_not_disturb_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as client:
        _, writer = await asyncio.open_connection("127.0.0.1", int(client.address.rpartition(":")[2]))
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head + b'{"response": ')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await client.post(RIGHT))[1]["reward"] == 1.0
        assert json.loads(await client.get("/health")) == {"status": "ok", "in_progress": 0}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_options_of_predictions_are_for_all_of_them() -> None:
    async with serving(rm_type=None) as client:
        body = {"predictions": ["yes", "no"], "answers": ["yes", "yes"], "rm_type": "exact", "metadata": "{}"}
        assert (await client.post(body))[1]["reward"] == [1.0, 0.0]


async def test_failures_of_a_batch_stay_with_their_responses() -> None:
    async with serving() as client:
        status, reply = await client.post(
            {"predictions": [r"\boxed{4}", None, r"\boxed{4}"], "answers": ["4", "4", {}]}
        )
        assert status == 200
        assert reply["reward"] == [1.0, None, None]
        assert reply["outcome"] == ["ok", "error", "error"]
        assert [bool(detail) for detail in reply["detail"]] == [False, True, True]


async def test_other_paths_and_methods_are_refused() -> None:
    async with serving() as client, aiohttp.ClientSession() as session:
        async with session.post(client.address + "/grade", data=b"{}") as reply:
            assert reply.status == 404
        async with session.get(client.address + "/get_reward") as reply:
            assert reply.status == 405


async def test_without_a_grader_the_request_has_to_name_one() -> None:
    async with serving(rm_type=None, allowed=("math",)) as client:
        assert (await client.post(RIGHT))[0] == 400
        assert (await client.post({**RIGHT, "rm_type": "math"}))[1]["reward"] == 1.0


async def test_too_much_at_once_is_refused_until_there_is_room() -> None:
    release, started = asyncio.Event(), asyncio.Event()

    async def slow(response: str, label: Any, metadata: Any) -> Verdict:
        started.set()
        await release.wait()
        return Verdict(reward=1.0)

    async with serving(max_in_progress=4, rm_type="slow", slow=OwnPace(slow)) as client:
        first = asyncio.create_task(client.post([RIGHT] * 3))
        await started.wait()
        assert json.loads(await client.get("/health"))["in_progress"] == 3
        status, reply = await client.post([RIGHT] * 2)
        assert status == 429
        assert client.headers["Retry-After"] == "1"
        assert reply["error"].startswith("3 of 4 responses are in progress")
        release.set()
        assert (await first)[0] == 200
        assert (await client.post([RIGHT] * 4))[0] == 200
        metrics = await client.get("/metrics")
        assert 'rollfeed_reward_verdicts_total{outcome="ok"} 7.0' in metrics
        assert "rollfeed_reward_refused_requests_total 1.0" in metrics
        assert "rollfeed_reward_in_progress 0.0" in metrics
        assert "rollfeed_reward_grading_seconds_count 7.0" in metrics


async def test_client_that_goes_away_gives_its_room_back() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless(response: str, label: Any, metadata: Any) -> Verdict:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serving(rm_type="endless", endless=OwnPace(endless)) as client:
        asking = asyncio.create_task(client.post(RIGHT))
        await started.wait()
        asking.cancel()
        await ended.wait()
        async with asyncio.timeout(60):
            while json.loads(await client.get("/health"))["in_progress"]:  # its end is told to nobody
                pass


@pytest.mark.parametrize("name", ["livecodebench", "boxed_livecodebench", "exact", "boxed_exact"])
@pytest.mark.parametrize("place", ["body", "body beside null", "metadata", "text", "text in a list"])
async def test_x05_graders_that_the_server_was_not_started_for_are_refused(name: str, place: str) -> None:
    body: Any = {
        "body": {**RIGHT, "rm_type": name},
        "body beside null": {**RIGHT, "rm_type": name, "metadata": "null"},
        "metadata": {**RIGHT, "metadata": {"rm_type": name}},
        "text": {**RIGHT, "rm_type": "math", "metadata": json.dumps({"rm_type": name})},
        "text in a list": [RIGHT, {**RIGHT, "metadata": json.dumps({"rm_type": name})}],
    }[place]
    ran: list[str] = []

    async def grader(response: str, label: Any, metadata: Any) -> Verdict:
        ran.append(response)
        return Verdict(reward=1.0)

    hub = RewardHub(graders={**BUILTIN_GRADERS, "livecodebench": OwnPace(grader)}, rm_type="math", timeout_seconds=5.0)
    application = RewardServer(hub, rm_types=["math"]).application()
    async with (
        serve_application(application, host="127.0.0.1", port=0) as address,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, address)
        status, reply = await client.post(body)
        assert (status, ran) == (400, [])
        assert f"this server was started for math: start it with --allow {name}" in reply["error"]
        assert (await client.post({**RIGHT, "rm_type": "boxed_math"}))[0] == 200


async def test_x05_a_text_of_a_page_runs_no_program() -> None:
    headers = {"Content-Type": "text/plain", "Host": "evil.example", "Origin": "http://evil.example"}
    async with serving() as client:
        for kept in ("Content-Type", "Host", "Origin"):
            given = {**JSON, kept: headers[kept]}
            async with client._session.post(client.address, data=json.dumps(RIGHT), headers=given) as reply:
                assert reply.status in (403, 415)


async def test_our_remote_grader_understands_our_server() -> None:
    async with serving() as client, RemoteGrader(RemoteRewardSettings(url=f"{client.address}/get_reward")) as grader:
        assert (await grader(r"\boxed{4}", "4", {})).reward == 1.0
        assert (await grader(r"\boxed{4}", {"a": 1}, {})).reward is None


async def test_our_remote_grader_understands_our_server_in_the_form_of_predictions() -> None:
    async with (
        serving() as client,
        RemoteGrader(RemoteRewardSettings(url=client.address, form="predictions")) as grader,
    ):
        assert (await grader(r"\boxed{4}", 4, {})).reward == 1.0
        assert (await grader(r"\boxed{5}", "4", {})).reward == 0.0


async def test_our_remote_grader_waits_for_room_in_our_server() -> None:
    release, started = asyncio.Event(), asyncio.Event()

    async def slow(response: str, label: Any, metadata: Any) -> Verdict:
        started.set()
        await release.wait()
        return Verdict(reward=1.0)

    async with (
        serving(max_in_progress=1, rm_type="slow", slow=OwnPace(slow)) as client,
        RemoteGrader(RemoteRewardSettings(url=client.address, timeout_seconds=60.0, max_tries=100)) as grader,
    ):
        first = asyncio.create_task(client.post(RIGHT))
        await started.wait()
        waiting = asyncio.create_task(grader("r", "l", {}))
        async with asyncio.timeout(60):
            # Its refusal is told to nobody else.
            while "refused_requests_total 0.0" in await client.get("/metrics"):
                pass
        release.set()
        await first
        assert (await waiting).reward == 1.0


async def test_port_that_is_taken_is_one_line() -> None:
    async with serving() as client:
        port = int(client.address.rpartition(":")[2])
        hub = RewardHub(graders=BUILTIN_GRADERS, timeout_seconds=1.0)
        with pytest.raises(ConfigError, match=f"port = {port}: cannot listen on"):
            async with serve_application(RewardServer(hub, rm_types=()).application(), host="127.0.0.1", port=port):
                pass
