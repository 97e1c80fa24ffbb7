from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest

from rollfeed.app.rewards import open_reward_hub
from rollfeed.config import RemoteForm, RemoteRewardSettings, RewardSettings
from rollfeed.config.api_key import ApiKey
from rollfeed.errors import ConfigError
from rollfeed.rewards.over_http.remote import RemoteGrader
from rollfeed.testing.virtual_loop import run_in_virtual_time
from rollfeed.types import Outcome

Serve = Callable[..., Any]
KEY = ApiKey("reward.remote.api_key_env", "REWARD_KEY", "secret-7")


async def grade(url: str | None, *, response: str = "r", label: Any = "l", **settings: Any) -> Any:
    api_key = settings.pop("api_key", None)
    patient = {"timeout_seconds": 60.0} | settings
    async with RemoteGrader(RemoteRewardSettings(url=url, **patient), api_key=api_key) as grader:
        verdict = await grader(response, label, {"prompt_text": "p"})
        assert grader._server.num_in_flight == 0
        return verdict


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (0.5, 0.5),
        (0, 0.0),
        (-1, -1.0),
        ({"reward": 2}, 2.0),
        ({"reward": [3.0]}, 3.0),
        ([0.25], 0.25),
        ({"reward": {"style": 1, "truth": 0}}, {"style": 1.0, "truth": 0.0}),
        ({"style": 1, "truth": 0}, {"style": 1.0, "truth": 0.0}),
        ({"score": -1, "acc": False, "pred": "4"}, {"score": -1.0, "acc": 0.0}),
    ],
)
async def test_reply_is_read_as_its_reward(serve_script: Serve, reply: Any, reward: Any) -> None:
    async with serve_script([{"json": reply}]) as server:
        assert (await grade(server.url)).reward == reward


@pytest.mark.parametrize(("label", "sent"), [("l", "l"), (4, "4"), (0.5, "0.5"), (["a"], "['a']"), (None, "")])
async def test_predictions_form_sends_one_response_as_it_is_and_its_label_as_text(
    serve_script: Serve, label: Any, sent: str
) -> None:
    async with serve_script([{"json": {"score": 0.5}}]) as server:
        assert (await grade(server.url, form=RemoteForm.PREDICTIONS, reply_key="score", label=label)).reward == 0.5
        assert server.bodies == [{"predictions": "r", "answers": sent}]


async def test_the_key_is_sent(serve_script: Serve) -> None:
    async with serve_script([{"json": 1}, {"json": 1}]) as server:
        await grade(server.url, api_key=KEY)
        await grade(server.url)
        assert server.keys == ["Bearer secret-7", None]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_wants_a_key_is_an_error_at_once_that_names_the_setting(
    serve_script: Serve, status: int
) -> None:
    async with serve_script([{"status": status, "text": "no"}, {"json": 1}] * 2) as server:
        unnamed = await grade(server.url)
        assert unnamed.outcome is Outcome.ERROR
        assert unnamed.detail == (
            f"{server.url}: HTTP {status}: name the variable that holds the key as reward.remote.api_key_env"
        )
        await grade(server.url)
        refused = await grade(server.url, api_key=KEY)
        assert f"HTTP {status}: the key in $REWARD_KEY was refused" in refused.detail


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_the_key_is_not_told_when_the_server_repeats_it(serve_script: Serve, status: int) -> None:
    async with serve_script([{"status": status, "text": "you sent Bearer secret-7"}]) as server:
        verdict = await grade(server.url, api_key=KEY, max_tries=1)
        assert f"HTTP {status}" in verdict.detail
        assert "secret" not in verdict.detail + repr(KEY)


async def test_a_variable_without_a_key_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_KEY", raising=False)
    settings = RewardSettings.model_validate({"remote": {"url": "http://a:1", "api_key_env": "REWARD_KEY"}})
    with pytest.raises(ConfigError, match=r"reward\.remote\.api_key_env = 'REWARD_KEY': the environment has no key"):
        async with open_reward_hub(settings):
            pass


@pytest.mark.parametrize(
    "reply",
    [
        {"json": {"reward": None}},
        {"json": {"reward": "0.5"}},
        {"json": {"reward": []}},
        {"json": {"reward": [1, 2]}},
        {"json": {"score": None}},
        {"json": {}},
        {"json": "good"},
        {"text": "NaN"},
        {"text": '{"reward": Infinity}'},
        {"text": "1" + "0" * 400},
        {"text": "<html>"},
        {"text": ""},
        {"text": "[" * 100_000},
        {"status": 404, "text": "not here"},
        {"status": 302, "headers": {"Location": "/"}, "text": ""},
    ],
    ids=str,
)
async def test_reply_without_a_number_is_an_error_and_not_asked_for_again(
    serve_script: Serve, reply: dict[str, Any]
) -> None:
    async with serve_script([reply, {"json": 1.0}]) as server:
        verdict = await grade(server.url)
        assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
        assert server.url in verdict.detail
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "failure", [{"status": 500}, {"status": 429}, {"status": 408}, {"reset": True}, {"hang": True}], ids=str
)
def test_failure_that_may_pass_is_tried_again(serve_script: Serve, failure: dict[str, Any]) -> None:
    async def main() -> None:
        async with serve_script([failure, {"json": 1.0}]) as server:
            assert (await grade(server.url)).reward == 1.0
            assert len(server.bodies) == 2

    run_in_virtual_time(main())


def test_server_that_hangs_is_a_timeout_after_its_tries(serve_script: Serve) -> None:
    async def main() -> None:
        async with serve_script([{"hang": True, "repeat": True}]) as server:
            verdict = await grade(server.url, timeout_seconds=20.0, max_tries=2)
            assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)
            assert verdict.detail == f"{server.url}: no reply within timeout_seconds = 20 (2 tries)"
            assert len(server.bodies) == 2

    run_in_virtual_time(main())


async def test_server_that_is_not_there_is_an_error_with_the_address() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # so that nobody else listens there
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        verdict = await grade(url, max_tries=2)
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)
    assert url in verdict.detail


async def test_reply_without_an_end_is_cut_off(serve_script: Serve) -> None:
    async with serve_script([{"text": "1" * 3_000_000, "repeat": True}]) as server:
        verdict = await grade(server.url, max_tries=1)
        assert verdict.outcome is Outcome.ERROR
        assert "larger than" in verdict.detail


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
async def test_proxies_of_the_environment_are_ignored(
    serve_script: Serve, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with serve_script([{"json": 1.0}]) as server:
        assert (await grade(server.url, max_tries=1)).reward == 1.0


async def test_address_that_leads_nowhere_is_an_error() -> None:
    verdict = await grade("http://127.0.0.1:1/", max_tries=1)
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)


@pytest.mark.parametrize("url", ["http://[broken/", "http://user@:0/", "ftp://127.0.0.1/"])
def test_what_is_no_address_is_refused_beforehand(url: str) -> None:
    with pytest.raises(ValueError, match=r"no address|Invalid IPv6"):
        RemoteRewardSettings(url=url)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n1.0",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n1.0",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n1.0",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
    ids=["cut short", "wrong chunk", "not gzip", "not http", "nothing"],
)
async def test_reply_that_breaks_off_or_is_no_http_is_an_error(reply: bytes) -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        await close(writer)
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        verdict = await grade(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", max_tries=1)
        await ended.wait()
    assert (verdict.outcome, verdict.reward) == (Outcome.ERROR, None)


def test_server_that_answers_a_byte_at_a_time_is_a_timeout() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"1")
                await writer.drain()
                await asyncio.sleep(1.0)
        await close(writer)
        ended.set()

    async def main() -> Any:
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            verdict = await grade(url, max_tries=1, timeout_seconds=20.0)
            await ended.wait()
            return verdict

    ended = asyncio.Event()
    verdict = run_in_virtual_time(main())
    assert (verdict.outcome, verdict.reward) == (Outcome.TIMEOUT, None)


async def test_large_response_is_sent_whole(serve_script: Serve) -> None:
    async with serve_script([{"json": 1.0}]) as server:
        assert (await grade(server.url, response="\ud83d" + "x" * 500_000)).reward == 1.0
        assert len(server.bodies[0]["response"]) == 500_001


async def test_without_an_address_the_setting_is_named() -> None:
    verdict = await grade(None)
    assert verdict.outcome is Outcome.ERROR
    assert "reward.remote.url" in verdict.detail


async def test_failed_verdict_of_a_reward_server_stays_one(serve_script: Serve) -> None:
    async with serve_script([{"json": {"reward": None, "outcome": "timeout", "detail": "too slow"}}]) as server:
        verdict = await grade(server.url)
        assert verdict.outcome is Outcome.TIMEOUT
        assert "too slow" in verdict.detail


async def test_requests_at_once_are_bounded_and_share_a_session(serve_script: Serve) -> None:
    reply = {"json": 1.0, "seconds": 0.02, "repeat": True}
    async with (
        serve_script([reply]) as server,
        RemoteGrader(RemoteRewardSettings(url=server.url, concurrency=4, timeout_seconds=60.0)) as grader,
    ):
        verdicts = await asyncio.gather(*(grader("r", "l", {}) for _ in range(32)))
        assert [verdict.reward for verdict in verdicts] == [1.0] * 32
        assert server.most_running <= 4


async def test_cancelled_grading_leaves_nothing_in_flight(serve_script: Serve) -> None:
    async with (
        serve_script([{"hang": True, "repeat": True}]) as server,
        RemoteGrader(RemoteRewardSettings(url=server.url)) as grader,
    ):
        grading = asyncio.create_task(grader("r", "l", {}))
        await server.asked.wait()
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        assert grader._server.num_in_flight == 0


@pytest.mark.parametrize("label", [object(), {1, 2}, b"bytes", float("nan")], ids=["object", "set", "bytes", "nan"])
async def test_label_that_is_not_json_is_an_error(serve_script: Serve, label: Any) -> None:
    async with serve_script([{"json": 1.0}]) as server:
        assert (await grade(server.url, label=label)).outcome is Outcome.ERROR
        assert server.bodies == []
