"""What agents, clients and strangers send that cannot be served: each is told so, counted, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.gateway.clients import TOKEN, Client, gateway, said

from rollfeed.gateway.policy import Caps
from rollfeed.testing import CharTokenizer, ScriptedEngine
from rollfeed.testing.scripted import Fault

QUESTION = {"role": "user", "content": "a"}
PATHS = {
    "/v1/chat/completions": {"messages": [QUESTION]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [QUESTION], "max_tokens": 5},
}

Try = Callable[[Client, dict[str, Any]], Awaitable[None]]


def run(attempt: Try, *, engine: ScriptedEngine | None = None, **others: Any) -> None:
    """Make an attempt beside a session of somebody else, which goes on as if nothing had been."""

    async def main() -> None:
        async with gateway(engine, **others) as client:
            other, opened = await client.open(), await client.open()
            text = said(await client.chat(other, [QUESTION]))
            await attempt(client, opened)
            told = [QUESTION, {"role": "assistant", "content": text}, QUESTION]
            said(await client.chat(other, told))
            (sample,) = await client.finish(other)
            assert sample["metadata"]["num_turns"] == 2
            assert sum(sample["loss_mask"]) == 4

    asyncio.run(main())


async def running(engine: ScriptedEngine, number: int) -> None:
    """Return when so many requests are at the engine."""
    async with asyncio.timeout(60):
        while (await engine.load()).running != number:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)


def is_error(path: str, reply: Any) -> bool:
    """Tell whether a reply has the form in which the API of a path tells errors."""
    if path == "/v1/messages":
        return bool(reply["type"] == "error" and reply["error"]["type"] and reply["error"]["message"])
    return {"message", "type", "param", "code"} <= reply["error"].keys()


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a model that is not served": ({"model": "gpt-9"}, 404, "not_found"),
    "no messages": ({"messages": [], "input": []}, 400, "invalid_request"),
    "messages that are none": ({"messages": "x", "input": 3}, 400, "invalid_request"),
    "images": (
        {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
        },
        400,
        "invalid_request",
    ),
    "a temperature that is none": ({"temperature": "hot"}, 400, "invalid_request"),
    "more than the context": (
        {"messages": [{"role": "user", "content": "a" * 70_000}], "input": "a" * 70_000},
        400,
        "invalid_request",
    ),
    "a prompt as long as the context": (
        {"messages": [{"role": "user", "content": "a" * 1_000}], "input": "a" * 1_000},
        400,
        "invalid_request",
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_served_is_refused_in_the_form_of_its_api_and_counted(path: str, case: str) -> None:
    changes, status, kind = REFUSED[case]

    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        url = opened["anthropic_base_url"] + path
        async with client.http.post(url, json={**PATHS[path], **changes}) as response:
            reply = await response.json()
            assert response.status == status, reply
            assert is_error(path, reply)
        assert client.count(kind) == 1
        assert (await client.operate("GET", f"/sessions/{opened['id']}"))[1]["num_turns"] == 0

    run(attempt, context_length=1_000)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["", "rf-other", "operator"], ids=["none", "foreign", "the operator's"])
def test_a_key_that_is_no_session_s_is_refused_and_counted(path: str, key: str) -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            async with client.http.post(client.address + path, json=PATHS[path], headers=headers) as response:
                assert response.status == 401
                assert is_error(path, await response.json())
        assert client.count("authentication") == 2

    run(attempt)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"messages": [' + b"{}," * 9 + b"{}]}"]
)
def test_a_body_that_is_no_request_is_refused_and_counted(body: bytes) -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        status, reply = await client.ask(opened["key"], body)
        assert status == 400
        assert is_error("/v1/chat/completions", reply)
        assert client.count("invalid_request") == 1

    run(attempt)


def head_of(path: str, size: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {size}"]
    lines += [f"x-api-key: {TOKEN}"]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("path", ["/s/{key}/v1/messages", "/sessions", "/sessions/{id}/finish"])
def test_of_a_body_that_is_too_large_nothing_is_read(path: str) -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        host, port = client.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        size = 200 * 1024**2
        writer.write(head_of(path.format(**opened), size))
        assert b" 413 " in await reader.readline()
        writer.close()
        assert client.count("too_large") == 1

    run(attempt)


@pytest.mark.parametrize("path", ["/s/{key}/v1/messages", "/sessions", "/sessions/{id}/finish"])
def test_a_body_that_does_not_come_is_refused_and_counted(path: str) -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        host, port = client.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head_of(path.format(**opened), 100) + b'{"reward": ')
        assert b" 400 " in await reader.readline()
        assert b"the body has not come within 0.05 seconds" in await reader.read()
        writer.close()
        assert client.count("invalid_request") == 1

    run(attempt, reading_seconds=0.05)


def test_a_body_that_turns_out_to_be_too_large_is_refused_and_counted() -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        async def pieces() -> Any:
            for _ in range(40):
                yield b" " * 1000

        url = f"{opened['openai_base_url']}/chat/completions"
        async with client.http.post(url, data=pieces()) as response:
            assert response.status == 413
        assert client.count("too_large") == 1

    run(attempt, caps=Caps(max_body_bytes=20_000))


def test_unknown_tools_and_histories_that_were_never_sent_are_taken_as_they_are() -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        call = {"id": "x", "type": "function", "function": {"name": "nobody_s", "arguments": "{}"}}
        told = [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "y", "content": "there"},
        ]
        await client.chat(opened, [QUESTION])
        said(await client.chat(opened, told))
        assert client.count("forks") == 1
        samples = await client.finish(opened)
        assert [sum(sample["loss_mask"]) for sample in samples] == [2, 2]
        assert "nobody_s" in "".join(map(chr, samples[1]["token_ids"]))

    run(attempt)


def test_a_session_at_a_bound_is_refused_with_what_clients_do_not_try_again() -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        await client.chat(opened, [QUESTION])
        await client.chat(opened, [QUESTION])
        headers = {"Authorization": f"Bearer {opened['key']}"}
        url = f"{client.address}/v1/chat/completions"
        async with client.http.post(url, json={"messages": [QUESTION]}, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "session_limit")
        assert client.count("permission") == 1
        assert (await client.operate("GET", f"/sessions/{opened['id']}"))[1]["ended_by"] == "max_turns"

    run(attempt, caps=Caps(max_turns=2))


def test_tokens_and_seconds_of_a_session_are_bounded() -> None:
    async def main() -> None:
        async with gateway(caps=Caps(max_tokens=3)) as client:
            opened = await client.open()
            assert (await client.chat(opened, [QUESTION]))["choices"][0]["finish_reason"] == "stop"
            assert (await client.chat(opened, [QUESTION]))["choices"][0]["finish_reason"] == "length"
            assert await client.chat(opened, [QUESTION]) == 403
        async with gateway(caps=Caps(max_seconds=1e-9)) as client:
            assert await client.chat(await client.open(), [QUESTION]) == 403

    asyncio.run(main())


def test_more_sessions_than_may_be_open_are_refused_until_one_has_ended() -> None:
    async def main() -> None:
        async with gateway(max_sessions=1) as client:
            opened = await client.open()
            assert (await client.operate("POST", "/sessions"))[0] == 429
            assert (await client.operate("DELETE", f"/sessions/{opened['id']}"))[0] == 200
            await client.open()
            assert client.count("dropped_sessions") == 1

    asyncio.run(main())


def test_operators_need_their_token_and_pages_of_browsers_are_refused() -> None:
    async def main() -> None:
        async with gateway() as client:
            opened = await client.open()
            for token in ("", "other", opened["key"]):
                for method, path in (
                    ("POST", "/sessions"),
                    ("GET", f"/sessions/{opened['id']}"),
                    ("DELETE", f"/sessions/{opened['id']}"),
                    ("POST", f"/sessions/{opened['id']}/finish"),
                ):
                    assert (await client.operate(method, path, token=token))[0] == 401
            address = urlsplit(client.address)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            told = b"POST /sessions HTTP/1.1\r\nHost: %b\r\nAuthorization: Bearer \xff\r\nContent-Length: 0\r\n\r\n"
            writer.write(told % address.netloc.encode())
            assert b" 401 " in await reader.readline()  # bytes of no text
            writer.close()
            await writer.wait_closed()
            headers = {"Authorization": "Bearer operator", "Origin": "http://evil"}
            async with client.http.post(f"{client.address}/sessions", headers=headers) as response:
                assert response.status == 403
            for body in ({"other": 1}, {"session_id": 7}, {"metadata": []}, [1]):
                assert (await client.operate("POST", "/sessions", body))[0] == 400
            for reward in ("x", True, {"a": "b"}, 10**400, {"a": -(10**30)}):
                assert (await client.operate("POST", f"/sessions/{opened['id']}/finish", {"reward": reward}))[0] == 400
            assert (await client.operate("POST", "/sessions", {"session_id": opened["id"]}))[0] == 400
            assert (await client.operate("POST", "/sessions/none/finish"))[0] == 404

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_request_at_the_engine_and_is_counted() -> None:
    engine = ScriptedEngine(fault_of=lambda request: Fault.HANG if len(request.token_ids) > 60 else None)

    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "x" * 80}], "stream": stream}
            task = asyncio.ensure_future(client.ask(opened["key"], body))
            await running(engine, 1)
            task.cancel()
            await running(engine, 0)
        assert client.count("cancelled_requests") == 2
        assert await client.finish(opened) == []

    run(attempt, engine=engine)


def test_a_session_that_ends_ends_what_is_under_way() -> None:
    engine = ScriptedEngine(fault_of=lambda request: Fault.HANG if len(request.token_ids) > 60 else None)

    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        task = asyncio.ensure_future(client.chat(opened, [{"role": "user", "content": "x" * 80}]))
        await running(engine, 1)
        assert await client.finish(opened) == []
        assert await task == 401
        assert await client.chat(opened, [QUESTION]) == 401

    run(attempt, engine=engine)


def test_clients_that_send_or_take_a_byte_at_a_time_hold_nobody_up() -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        host, port = client.address.removeprefix("http://").split(":")
        half = await asyncio.open_connection(host, int(port))
        half[1].write(b"POST /v1/chat/compl")
        slow = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": [QUESTION], "stream": True}).encode()
        path = f"/s/{opened['key']}/v1/chat/completions"
        slow[1].write(head_of(path, len(body)) + body[:3])
        for _ in range(5):
            said(await client.chat(opened, [QUESTION]))
        slow[1].write(body[3:])
        assert b" 200 " in await slow[0].readline()
        said(await client.chat(opened, [QUESTION]))
        for _, writer in (half, slow):
            writer.close()

    run(attempt)


def test_connections_without_a_request_are_closed_and_counted_and_those_with_one_are_not() -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        task = asyncio.ensure_future(client.chat(opened, [{"role": "user", "content": "x" * 80}]))
        await running(client.engine, 1)
        host, port = client.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/compl")
        assert await reader.read() == b""
        assert client.count("silent_connections") >= 1
        assert not task.done()
        await client.engine.abort()
        assert await task == 503
        writer.close()

    engine = ScriptedEngine(fault_of=lambda request: Fault.HANG if len(request.token_ids) > 60 else None)
    run(attempt, engine=engine, silent_seconds=0.5)


def test_an_engine_that_fails_is_told_and_counted() -> None:
    engine = ScriptedEngine(fault_of=lambda request: Fault.RAISE if len(request.token_ids) > 60 else None)

    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        for stream in (False, True):
            told = [{"role": "user", "content": "x" * 80}]
            assert await client.chat(opened, told, stream=stream) == 503
        assert client.count("overloaded") == 2

    run(attempt, engine=engine)


RETRIES: dict[str, tuple[dict[str, str], dict[str, str], bool]] = {
    "the same key": ({"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}, True),
    "another key": ({"Idempotency-Key": "k"}, {"Idempotency-Key": "l"}, False),
    "an equal body that is said to be a retry": ({}, {"x-stainless-retry-count": "1"}, True),
    "an equal body that is not": ({}, {"x-stainless-retry-count": "0"}, False),
}


@pytest.mark.parametrize("case", RETRIES)
def test_a_retry_is_answered_from_the_record_where_it_says_so_and_sampled_otherwise(case: str) -> None:
    first, second, is_same = RETRIES[case]

    async def main() -> None:
        async with gateway() as client:
            opened = await client.open()
            replies = [await client.chat(opened, [QUESTION], n=2, headers=each) for each in (first, second)]
            assert (replies[0] == replies[1]) is is_same
            assert client.count("replayed_requests") == is_same
            assert len(client.engine.requests) == (2 if is_same else 4)

    asyncio.run(main())


def test_a_key_of_another_request_is_refused() -> None:
    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        headers = {"Idempotency-Key": "k"}
        said(await client.chat(opened, [QUESTION], headers=headers))
        assert await client.chat(opened, [QUESTION, QUESTION], headers=headers) == 400

    run(attempt)


def test_a_retry_of_what_is_under_way_is_told_to_come_again() -> None:
    engine = ScriptedEngine(fault_of=lambda request: Fault.HANG if len(request.token_ids) > 60 else None)

    async def attempt(client: Client, opened: dict[str, Any]) -> None:
        told = [{"role": "user", "content": "x" * 80}]
        task = asyncio.ensure_future(client.chat(opened, told, headers={"Idempotency-Key": "k"}))
        await running(engine, 1)
        assert await client.chat(opened, told, headers={"Idempotency-Key": "k"}) == 429
        assert await client.chat(opened, told, headers={"x-stainless-retry-count": "1"}) == 429
        task.cancel()

    run(attempt, engine=engine)


def test_a_response_is_gone_on_with_by_its_id() -> None:
    async def main() -> None:
        async with gateway() as client:
            opened = await client.open()
            url = f"{opened['openai_base_url']}/responses"
            async with client.http.post(url, json={"input": "a", "instructions": "be brief"}) as response:
                first = await response.json()
            body = {"input": "b", "previous_response_id": first["id"], "instructions": "be brief"}
            async with client.http.post(url, json=body) as response:
                assert response.status == 200
            sent = CharTokenizer().decode(client.engine.requests[1].token_ids, skip_special_tokens=False)
            assert sent.startswith("system: be brief\nuser: a\nassistant: ")
            assert "user: b\n" in sent
            assert len(await client.finish(opened)) == 1
            async with client.http.post(url, json={**body, "previous_response_id": "none"}) as response:
                assert response.status in (401, 404)

    asyncio.run(main())
