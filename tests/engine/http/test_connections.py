"""Replies arrive whole however they are cut, and what is not one is an error."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from rollfeed.engine.http import BrokenConnectionError, Connections, NotConnectedError


class RawServer:
    """Answers each request with the given pieces, one write a piece; an empty one closes the connection."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_closed = 0
        self.address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.pieces:
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_closed += 1
        finally:
            writer.close()


Serving = Callable[[Sequence[bytes]], AbstractAsyncContextManager[RawServer]]


@pytest.fixture
def serving() -> Serving:
    @asynccontextmanager
    async def start(pieces: Sequence[bytes]) -> AsyncIterator[RawServer]:
        raw = RawServer(pieces)
        server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
        raw.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield raw
        finally:
            server.close()
            await server.wait_closed()

    return start


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    pool = Connections(limit=2, headers={})
    yield pool
    await pool.close()


def cut(reply: bytes, size: int) -> list[bytes]:
    return [reply[start : start + size] for start in range(0, len(reply), size)]


Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """Wait for something that has no event of its own."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.005)

    return wait


SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


@pytest.mark.parametrize("reply", [SIZED, CHUNKED, CONTINUED])
@pytest.mark.parametrize("size", [1, 7, 48, 10_000])
async def test_a_reply_is_whole_however_it_is_cut(
    serving: Serving, connections: Connections, reply: bytes, size: int
) -> None:
    async with serving(cut(reply, size)) as server:
        for _ in range(3):
            got = await connections.request("POST", server.address, "/generate", b'{"a":1}')
            assert (got.status, bytes(got.content)) == (200, b"hello world")
        assert server.num_connections == 1
        request = server.requests[0]
        assert request.startswith(b"POST /generate HTTP/1.1\r\n")
        assert f"Host: {server.address.removeprefix('http://')}\r\n".encode() in request
        assert request.endswith(b'Content-Length: 7\r\n\r\n{"a":1}')


async def test_a_body_may_end_with_its_connection(serving: Serving, connections: Connections) -> None:
    async with serving([b"HTTP/1.1 500 Oh\r\n\r\nit ", b"broke", b""]) as server:
        for number in (1, 2):
            got = await connections.request("POST", server.address, "/", b"")
            assert (got.status, bytes(got.content)) == (500, b"it broke")
            assert server.num_connections == number


@pytest.mark.parametrize("status", [b"204 None", b"200 OK\r\nContent-Length: 0"])
async def test_a_reply_may_be_empty(serving: Serving, connections: Connections, status: bytes) -> None:
    async with serving([b"HTTP/1.1 " + status + b"\r\n\r\n"]) as server:
        for _ in range(2):
            assert bytes((await connections.request("POST", server.address, "/", b"")).content) == b""
        assert server.num_connections == 1


@pytest.mark.parametrize(
    "pieces",
    [
        [b""],
        [b"HTTP/1.1 200 OK\r\nContent-Le", b""],
        [SIZED[:-3], b""],
        [CHUNKED[:-9], b""],
        [b"220 smtp.example ESMTP\r\n\r\n", b""],
        [b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nmore"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n"],
        [b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2147483649\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n" * 300 + SIZED],
        [SIZED + SIZED],
        [b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
    ],
)
async def test_x14_what_is_no_whole_reply_is_an_error(
    serving: Serving, connections: Connections, pieces: Sequence[bytes]
) -> None:
    async with asyncio.timeout(60), serving(pieces) as server:
        with pytest.raises(BrokenConnectionError):
            await connections.request("POST", server.address, "/", b"")
        server.pieces = [SIZED]
        assert (await connections.request("POST", server.address, "/", b"")).status == 200
        assert server.num_connections == 2


async def test_nobody_there_is_told_from_a_lost_connection(serving: Serving, connections: Connections) -> None:
    async with serving([]) as server:
        address = server.address
    with pytest.raises(NotConnectedError):
        await connections.request("POST", address, "/", b"")


async def test_a_connection_that_the_server_closes_while_idle_is_not_used_again(
    serving: Serving, connections: Connections, until: Until
) -> None:
    async with serving([SIZED, b""]) as server:
        for number in (1, 2, 3):
            assert (await connections.request("POST", server.address, "/", b"")).status == 200
            assert server.num_connections == number
            await until(lambda: connections.is_empty)


async def test_never_more_connections_than_the_limit_and_all_are_answered(
    serving: Serving, connections: Connections, until: Until
) -> None:
    async with serving([SIZED]) as server, serving([SIZED]) as other:
        for each in (server, other):
            replies = await asyncio.gather(*(connections.request("POST", each.address, "/", b"") for _ in range(20)))
            assert {reply.status for reply in replies} == {200}
            assert each.num_connections == 2
        await until(lambda: server.num_closed == 2)  # two are open to the other one


async def test_giving_up_closes_the_connection_and_frees_its_place(
    serving: Serving, connections: Connections, until: Until
) -> None:
    async with serving([]) as server:
        waiting = [asyncio.create_task(connections.request("POST", server.address, "/", b"")) for _ in range(4)]
        await until(lambda: len(server.requests) == 2)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await until(lambda: server.num_closed == 2)
        server.pieces = [SIZED]
        assert (await connections.request("POST", server.address, "/", b"")).status == 200


async def test_replies_that_arrive_at_once_in_pieces_do_not_mix(serving: Serving, connections: Connections) -> None:
    other = SIZED.replace(b"hello world", b"HELLO WORLD").replace(b"X-A: b", b"X-A: B")
    async with serving(cut(SIZED, 9)) as one, serving(cut(other, 9)) as another:
        for _ in range(3):
            got, also = await asyncio.gather(
                connections.request("POST", one.address, "/generate", b"{}"),
                connections.request("POST", another.address, "/generate", b"{}"),
            )
            assert (bytes(got.content), got.headers["x-a"]) == (b"hello world", "b")
            assert (bytes(also.content), also.headers["x-a"]) == (b"HELLO WORLD", "B")


async def test_large_replies_wait_at_the_server_while_those_before_them_are_unread(
    connections: Connections, serving: Serving, until: Until
) -> None:
    """Two bodies that together are above the bound: the second is received when the first one is let go."""
    size = 12 << 20
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    async with serving([reply]) as server:
        tasks = [asyncio.create_task(connections.request("POST", server.address, "/", b"{}")) for _ in range(2)]
        await until(lambda: any(task.done() for task in tasks))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert [task.done() for task in tasks].count(True) == 1
        first = next(task for task in tasks if task.done())
        second = next(task for task in tasks if not task.done())
        assert len(first.result().content) == size
        tasks.clear()
        del first
        assert (await second).content == b"x" * size


async def test_a_request_given_up_while_its_reply_waits_for_room_takes_none(
    connections: Connections, serving: Serving, until: Until
) -> None:
    size = 12 << 20
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    async with serving([reply]) as server:
        kept = await connections.request("POST", server.address, "/", b"{}")
        waiting = asyncio.create_task(connections.request("POST", server.address, "/", b"{}"))
        await until(lambda: len(server.requests) == 2)
        for _ in range(20):
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del kept
        again = await connections.request("POST", server.address, "/", b"{}")
        assert len(again.content) == size


@pytest.mark.parametrize("head", [b"Content-Length: 70000", b"Transfer-Encoding: chunked", b"X: y"])
async def test_x14_a_body_longer_than_may_be_is_not_received(
    connections: Connections, serving: Serving, head: bytes
) -> None:
    body = b"11170\r\n" + b"x" * 70_000 + b"\r\n" if b"chunked" in head else b"x" * 70_000
    async with serving(cut(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body, 10_000)) as server:
        with pytest.raises(BrokenConnectionError, match="50000"):
            await connections.request("POST", server.address, "/", b"{}", most_bytes=50_000)


async def test_x14_memory_grows_with_what_comes_and_not_with_what_is_announced(
    connections: Connections, serving: Serving, until: Until
) -> None:
    async with serving([b"HTTP/1.1 200 OK\r\nContent-Length: 2000000000\r\n\r\nabc"]) as server:
        tracemalloc.start()
        task = asyncio.create_task(connections.request("POST", server.address, "/", b"{}"))
        await until(lambda: len(server.requests) == 1)
        await asyncio.sleep(0.05)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
        tracemalloc.stop()
        task.cancel()
        await asyncio.wait([task])


async def test_events_are_handed_on_as_they_come(connections: Connections, serving: Serving) -> None:
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    events = b": comment\n\ndata: one\n\ndata: two\r\n\r\ndata: [DONE]\n\n"
    taken: list[bytes] = []
    async with serving([*cut(stream + events, 5), b""]) as server:
        reply = await connections.request("POST", server.address, "/", b"{}", events=taken.append)
        assert (reply.content, taken) == (None, [b"one", b"two"])
        server.pieces = [*cut(stream + events.removesuffix(b"data: [DONE]\n\n"), 5), b""]
        with pytest.raises(BrokenConnectionError, match="before its last event"):
            await connections.request("POST", server.address, "/", b"{}", events=taken.append)

        def refuse(content: bytes) -> None:
            raise KeyError(content)

        with pytest.raises(KeyError, match="one"):
            await connections.request("POST", server.address, "/", b"{}", events=refuse)
