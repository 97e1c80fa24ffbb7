"""What servers say is read, whatever bytes it is made of."""

import asyncio

import pytest

from rollfeed.config.api_key import ApiKey
from rollfeed.engine.http import ControlReply, Http

ODD = [
    pytest.param(b'{"a": "\xff"}', id="a text that is not UTF-8"),
    pytest.param(b"[" * 100_000, id="nested without end"),
    pytest.param(b"<html>", id="a page"),
    pytest.param(b"[1]", id="a list"),
    pytest.param(b"", id="nothing"),
]


@pytest.mark.parametrize("content", ODD)
def test_a_body_that_is_no_object_is_none(content: bytes) -> None:
    assert ControlReply(200, content).json() == {}


@pytest.mark.parametrize("content", ODD)
def test_an_error_of_whatever_bytes_is_one_line(content: bytes) -> None:
    error = ControlReply(500, content).error
    assert error.startswith("HTTP 500: ")
    assert "\n" not in error
    assert len(error) < 1000


class Letter(bytes):
    """A body that tells when nobody has it any more."""

    gone = 0

    def __del__(self) -> None:
        Letter.gone += 1


async def test_a_body_that_was_sent_is_not_kept_while_its_reply_is_waited_for() -> None:
    Letter.gone, came, may_answer = 0, asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{long}")
        came.set()
        await may_answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Http(api_key=ApiKey(""), max_connections=1, control_timeout_seconds=60.0) as http:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        asking = asyncio.create_task(http.generate(address, "/", Letter(b"{long}")))
        await came.wait()
        assert Letter.gone == 1
        may_answer.set()
        assert await asking == b"{}"
