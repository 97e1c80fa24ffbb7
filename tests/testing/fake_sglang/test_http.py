"""The bare HTTP server, with sockets and bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from rollfeed.errors import ConfigError
from rollfeed.testing.fake_sglang import serve_fake_sglang

GENERATE = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}).encode()


async def talk(address: str, *pieces: bytes, until: bytes) -> bytes:
    """Send pieces, each after the loop has turned, and read until an ending comes."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    received = await reader.readuntil(until)
    writer.close()
    await writer.wait_closed()
    return received


def post(body: bytes, *fields: str) -> bytes:
    lines = ["POST /generate HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def test_requests_in_one_piece_are_answered_in_order() -> None:
    async with serve_fake_sglang() as fakes:
        received = await talk(fakes.address, post(GENERATE) + b"GET /nothing HTTP/1.1\r\n\r\n", until=b'Not Found"}')
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.index(b"output_ids") < received.index(b"HTTP/1.1 404 Not Found\r\n")


async def test_requests_in_many_pieces_are_put_together() -> None:
    message = post(GENERATE)
    async with serve_fake_sglang() as fakes:
        received = await talk(fakes.address, *(message[i : i + 7] for i in range(0, len(message), 7)), until=b"}}")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_client_that_asks_whether_to_go_on_is_told_so() -> None:
    message = post(GENERATE, "Expect: 100-continue")
    head = message[: -len(GENERATE)]
    async with serve_fake_sglang() as fakes:
        assert await talk(fakes.address, head, until=b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_bodies_in_chunks_are_put_together() -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (GENERATE[:9], GENERATE[9:], b""))
    message = b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    async with serve_fake_sglang() as fakes:
        assert (await talk(fakes.address, message, until=b"}}")).startswith(b"HTTP/1.1 200 ")


async def test_what_is_not_http_ends_its_connection_only(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        for message in (b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n"):
            assert (await talk(fakes.address, message, until=b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        await client.generate(fakes.address, max_new_tokens=1)


async def test_connections_are_kept_alive(client: Any) -> None:
    async with serve_fake_sglang() as fakes:
        for _ in range(20):
            await client.generate(fakes.address, max_new_tokens=1)
        assert (await fakes.stats())["most_connections"] <= 2  # ours, and the one that asks for this


async def test_many_connections_get_large_replies_at_once() -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2000}, "return_logprob": True}
    num_requests = 500

    async def ask(session: aiohttp.ClientSession, address: str) -> int:
        async with session.post(f"{address}/generate", json=body) as response:
            return len(json.loads(await response.read())["meta_info"]["output_token_logprobs"])

    async with (
        serve_fake_sglang() as fakes,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        lengths = await asyncio.gather(*(ask(session, fakes.address) for _ in range(num_requests)))
        counts = await fakes.stats()
    assert lengths == [2000] * num_requests
    assert counts["most_connections"] >= num_requests


async def test_a_taken_port_is_told_in_one_line() -> None:
    async with serve_fake_sglang() as fakes:
        port = int(fakes.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"port = {port}: cannot listen"):
            async with serve_fake_sglang(port=port):
                pass
