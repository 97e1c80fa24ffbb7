"""Hosts as plain processes of this machine, for what holds of hosts of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rollfeed.base.waiting import until_done
from rollfeed.cluster import Host, HostDiedError, Hosted, Hosting
from rollfeed.cluster.hosting import returned

_HEADER_BYTES = 8
_SERVE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.cluster.process_hosting import serve
serve(*given)
"""


class ProcessHost(Host):
    """A process that is asked through a socket."""

    def __init__(self, process: Any, connection: socket.socket, name: str) -> None:
        self.name = name
        self._process = process
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._reading = asyncio.create_task(self._read(connection))
        self._is_open = asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        if self._reading.done():
            raise HostDiedError(f"{self.name} has ended")
        self._num_calls += 1
        answer = self._calls[self._num_calls] = asyncio.get_running_loop().create_future()
        await self._is_open.wait()
        self._writer.write(framed((self._num_calls, method, args)))
        return returned(await answer)

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> None:
        self.kill()
        await self._reading
        await asyncio.to_thread(self._process.join)
        self._process.close()

    async def _read(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._is_open.set()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, outcome = await unframed(reader)
                if not (answer := self._calls.pop(number)).done():
                    answer.set_result(outcome)
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(HostDiedError(f"{self.name} has died"))
                answer.exception()


class ProcessHosting(Hosting):
    """As many machines as there are said to be, all of them this one."""

    def __init__(self, forks: ForkServerContext, num_nodes: int = 2) -> None:
        begun = forks.Process(target=exec, args=("",))  # what it forks from has imported everything when it has ended
        begun.start()
        begun.join()
        begun.close()
        self._forks = forks
        self.hosts: list[ProcessHost] = []
        self.is_left = False
        self._num_nodes = num_nodes

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    async def __aenter__(self) -> ProcessHosting:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.is_left = True
        for host in self.hosts:
            await host.end()

    async def reserve(self, num_places: int) -> None:
        del num_places

    async def start(self, factory: str, *args: Any, place: int | None) -> ProcessHost:
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._forks.Process(target=exec, args=(_SERVE, {"given": (theirs, factory, args)}))
            try:
                await until_done(asyncio.create_task(asyncio.to_thread(process.start)))
            except asyncio.CancelledError:  # the process ends when it reads that nobody asks any more
                ours.close()
                raise
        self.hosts.append(ProcessHost(process, ours, f"worker {place}"))
        return self.hosts[-1]

    def share(self, value: Any) -> Any:
        return value


def framed(value: Any) -> bytes:
    packed = pickle.dumps(value)
    return len(packed).to_bytes(_HEADER_BYTES, "little") + packed


async def unframed(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(_HEADER_BYTES), "little")
    return pickle.loads(await reader.readexactly(size))


def serve(connection: socket.socket, factory: str, args: tuple[Any, ...]) -> None:
    """Answer calls until nobody can ask any more."""
    os.setsid()
    asyncio.run(_serve(connection, Hosted(factory, *args)))


async def _serve(connection: socket.socket, hosted: Hosted) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    running = set[asyncio.Task[None]]()

    async def answer(number: int, method: str, given: tuple[Any, ...]) -> None:
        writer.write(framed((number, await hosted.call(method, *given))))

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            task = asyncio.create_task(answer(*await unframed(reader)))
            running.add(task)
            task.add_done_callback(running.discard)
    os.kill(os.getpid(), signal.SIGKILL)
