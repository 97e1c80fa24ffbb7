"""What no client of ours sends: half a request, and requests of pages and of other hosts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import rollfeed
from rollfeed.base.serving import _Door, check_structure, decoded_body, is_loopback, serve_application

NUM_DESCRIPTORS = 256
SERVER = f"""
import asyncio, logging, resource, sys
from aiohttp import web
from rollfeed.base.serving import serve_application
resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_DESCRIPTORS}, {NUM_DESCRIPTORS}))
logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
async def echo(request):
    return web.Response(body=await request.read())
async def main():
    application = web.Application()
    application.add_routes([web.post("/", echo)])
    async with serve_application(application, host="127.0.0.1", port=0) as address:
        print(address, file=sys.stderr, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
HALF_SENT = {
    "head": HEAD,
    "body": HEAD + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n[1,",
    "chunk": HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n50\r\n[1,",
}


@pytest.mark.parametrize("sent", [HALF_SENT["head"], HALF_SENT["body"]])
async def test_x04_half_sent_requests_do_not_keep_others_out(sent: bytes) -> None:
    source = {**os.environ, "PYTHONPATH": str(Path(rollfeed.__file__).parents[1])}
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdin=pipe, stderr=pipe, env=source)
    assert server.stderr is not None
    async with asyncio.timeout(60):
        address = (await server.stderr.readline()).decode().strip()
        host, _, port = address.removeprefix("http://").partition(":")
        held = []
        for _ in range(NUM_DESCRIPTORS + 64):
            held.append(await asyncio.open_connection(host, int(port)))
            held[-1][1].write(sent)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for number in range(20):
                async with session.post(address, json=number) as reply:
                    assert (reply.status, await reply.text()) == (200, str(number))
        _, told = await server.communicate(b"")
    for _, writer in held:
        writer.close()
    (line,) = told.decode().splitlines()
    assert line == "LOG all 160 connections are taken: those without a whole request are closed"
    assert server.returncode == 0


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[str]:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    application = web.Application()
    application.add_routes([web.post("/", echo), web.get("/", echo), web.get("/health", echo)])
    async with serve_application(application, host="127.0.0.1", port=0, **options) as address:
        yield address


@pytest.mark.parametrize("sent", [HALF_SENT["head"], HALF_SENT["body"], HALF_SENT["chunk"]])
async def test_x04_a_request_that_does_not_come_to_its_end_is_closed(sent: bytes) -> None:
    async with serving(silent_seconds=0.05) as address, asyncio.timeout(60):
        host, _, port = address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


@asynccontextmanager
async def looked_at(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[tuple[Callable[[], None], asyncio.StreamReader, asyncio.StreamWriter]]:
    """Give a connection to a server, and what closes silent ones when the test says so."""
    application = web.Application()
    application.add_routes([web.post("/", handler)])
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    door = _Door(runner.server, application, 1)
    server = await asyncio.get_running_loop().create_server(door, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            yield door.close_silent, reader, writer
            writer.close()
    finally:
        server.close()
        await runner.cleanup()


async def test_x04_a_body_that_goes_on_coming_is_not_closed() -> None:
    num_bytes, has_more = 0, asyncio.Event()

    async def count(request: web.Request) -> web.Response:
        nonlocal num_bytes
        async for piece in request.content.iter_any():
            num_bytes += len(piece)
            has_more.set()
        return web.Response()

    async with looked_at(count) as (look, reader, writer):
        writer.write(HEAD + b"Content-Length: 10000000\r\n\r\n")
        for number in range(1, 5):
            writer.write(bytes(1 << 16))
            while num_bytes < number << 16:
                has_more.clear()
                await has_more.wait()
            look()
        writer.write(bytes((1 << 16) - 1))
        while num_bytes < (5 << 16) - 1:
            has_more.clear()
            await has_more.wait()
        assert not reader.at_eof()
        look()  # since the last one too little has come
        assert await reader.read() == b""


async def test_a_connection_that_asks_again_and_again_is_not_taken_for_silent() -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=b"end")

    async with looked_at(answer) as (look, reader, writer):
        for _ in range(5):
            writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
            assert (await reader.readuntil(b"end")).startswith(b"HTTP/1.1 200")
            look()
        look()
        assert await reader.read() == b""


REFUSED: dict[str, tuple[dict[str, str], int]] = {
    "a page of another address": ({"Origin": "http://evil.example"}, 403),
    "a sandboxed page": ({"Origin": "null"}, 403),
    "a page of another port": ({"Origin": "http://127.0.0.1:1"}, 403),
    "a page that says so": ({"Sec-Fetch-Site": "cross-site"}, 403),
    "a name that points here": ({"Host": "evil.example:80"}, 403),
    "a name that begins like loopback": ({"Host": "127.0.0.1.evil.example"}, 403),
    "text": ({"Content-Type": "text/plain"}, 415),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    "a form of parts": ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    "text with parameters": ({"Content-Type": "text/plain; application/json"}, 415),
    "no type": ({"Content-Type": ""}, 415),
    "no key": ({"Authorization": ""}, 401),
    "another key": ({"Authorization": "Bearer other"}, 401),
    "a key that is no text": ({"Authorization": "Bearer \udcff"}, 401),
}


@pytest.mark.parametrize(("headers", "status"), REFUSED.values(), ids=REFUSED)
async def test_x05_what_pages_and_strangers_send_is_refused(headers: dict[str, str], status: int) -> None:
    usual = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    async with serving(key="secret") as address, aiohttp.ClientSession() as session:
        async with session.post(address, data=b"[1]", headers=usual) as reply:
            assert await reply.read() == b"[1]"
        async with session.post(address, data=b"[1]", headers={**usual, **headers}) as reply:
            assert reply.status == status
            assert (await reply.json())["error"]["message"]


async def test_x05_health_needs_no_key_and_clients_of_anthropic_have_theirs_elsewhere() -> None:
    async with serving(key="secret") as address, aiohttp.ClientSession() as session:
        async with session.get(f"{address}/health") as reply:
            assert reply.status == 200
        async with session.get(address, headers={"x-api-key": "secret"}) as reply:
            assert reply.status == 200
        async with session.get(address) as reply:
            assert reply.status == 401


def test_x05_loopback_is_what_only_this_machine_reaches() -> None:
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "::1", "a.localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.5", "localhost.evil.example", "", "*"):
        assert not is_loopback(host)


@given(st.recursive(st.none() | st.text(alphabet='[]{}"\\a'), lambda inner: st.lists(inner, max_size=3), max_leaves=9))
def test_x03_brackets_and_quotes_in_texts_do_not_count(value: Any) -> None:
    import msgspec

    check_structure(msgspec.json.encode(["[" * 200, value, {'"[' * 60: '\\"{' * 60}, "\\" * 101]))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a": [' + b"[]," * (1 << 18) + b"[]]}", "262144 lists and objects"),
        (b"[" + b'{"":1},' * (1 << 18) + b"1]", "262144 lists and objects"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "100 lists and objects deep"),
        (b"[" * 100_000 + b"]" * 100_000, "deep"),
        (b'["\\"' + b"[" * 200 + b'", ' + b"[" * 100 + b"]" * 101, "deep"),
        (b'"",' * (3 << 20) + b"[" * 200, "quotes"),
    ],
    ids=["lists", "objects", "deep objects", "deep lists", "deep behind a text", "quotes"],
)
async def test_x03_a_body_of_many_or_deep_values_is_refused_before_it_is_decoded(body: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        await decoded_body(body, large_bytes=1 << 16)
