"""Starting fakes: in this process, or in one of their own with the same handle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

import rollfeed
from rollfeed.errors import ConfigError, EngineUnavailableError
from rollfeed.testing.fake_sglang.clock import Clock
from rollfeed.testing.fake_sglang.router import FakeRouter
from rollfeed.testing.fake_sglang.server import FakeServer
from rollfeed.testing.fake_sglang.settings import FakeSettings, FaultKind, RouterDialect, ScriptedReply, ServerFault

_START_SECONDS = 60.0
_CONTROL_SECONDS = 30.0
_POLL_SECONDS = 0.002
_PROGRAM = "from rollfeed.testing.fake_sglang.launch import main; main()"


class Fakes:
    """Running servers, and a router if there is one. All calls go over their sockets."""

    def __init__(self, addresses: Sequence[str], router_address: str | None, session: aiohttp.ClientSession) -> None:
        self.addresses = tuple(addresses)
        """Of the servers: ``http://host:port``."""
        self.router_address = router_address
        self.servers: tuple[FakeServer, ...] = ()
        """The servers themselves, if they run in this process."""
        self.router: FakeRouter | None = None
        """The router itself, if it runs in this process."""
        self.process: asyncio.subprocess.Process | None = None
        """Where they run, if not in this process."""
        self._session = session

    @property
    def address(self) -> str:
        """The address that clients ask: the router's, or the first server's."""
        return self.router_address or self.addresses[0]

    async def add_fault(
        self, fault: ServerFault | FaultKind | str, *, worker: int | str | None = None, **fields: Any
    ) -> None:
        """Put a fault in force: ``add_fault("status", status=429, times=2)``.

        ``worker`` is a server by number or address (the router's too), by default all servers; ``fields`` are further
        ones of ServerFault.
        """
        if not isinstance(fault, ServerFault):
            fault = ServerFault(kind=FaultKind(fault), **fields)
        for address in self._addressed(worker):
            await self._ask("POST", address, "/fault", msgspec.json.encode(fault))

    async def clear_faults(self, *, worker: int | str | None = None) -> None:
        """Let nothing go wrong any more."""
        for address in self._addressed(worker):
            await self._ask("DELETE", address, "/fault")

    async def extend_script(self, *replies: ScriptedReply, worker: int | str | None = None) -> None:
        """Add replies to the end of the scripts."""
        for address in self._addressed(worker):
            await self._ask("POST", address, "/script", msgspec.json.encode(replies))

    async def stats(self, worker: int | str = 0) -> dict[str, Any]:
        """Return what has happened at a server since the start: counts of requests by path, of faults, ..."""
        counts: dict[str, Any] = await self._ask("GET", self._addressed(worker)[0], "/stats")
        return counts

    async def requests(self, worker: int | str = 0) -> list[dict[str, Any]]:
        """Return the latest bodies of ``/generate`` at a server, oldest first; none in mode ``zero``."""
        bodies: list[dict[str, Any]] = await self._ask("GET", self._addressed(worker)[0], "/requests")
        return bodies

    async def wait_until(self, condition: Callable[[dict[str, Any]], bool], *, worker: int | str = 0) -> dict[str, Any]:
        """Ask for the statistics until they are as expected, and return them."""
        while not condition(counts := await self.stats(worker)):  # noqa: ASYNC110 - it is known by asking only
            await asyncio.sleep(_POLL_SECONDS)
        return counts

    def kill(self, worker: int | None = None) -> None:
        """Kill the process; in this process, drop the sockets of one server or of all.

        Raises:
            ValueError: If one of several servers of another process is meant: order ``die`` there.
        """
        if self.process is not None:
            if worker is not None and len(self.addresses) > 1:
                raise ValueError("several servers share the process: use add_fault('die', worker=...)")
            if self.process.returncode is None:
                self.process.kill()
            return
        for server in self.servers if worker is None else [self.servers[worker]]:
            server.die()

    def _addressed(self, worker: int | str | None) -> Sequence[str]:
        if worker is None:
            return self.addresses
        return [self.addresses[worker] if isinstance(worker, int) else worker]

    async def _ask(self, method: str, address: str, path: str, body: bytes | None = None) -> Any:
        async with self._session.request(method, address + path, data=body) as response:
            content = await response.json(content_type=None)
            if response.status != 200:
                raise ConfigError(f"{path}: {content['error']['message']}")
            return content


@asynccontextmanager
async def serve_fake_sglang(
    settings: FakeSettings | None = None, *, clock: Clock | None = None, **fields: Any
) -> AsyncIterator[Fakes]:
    """Run fakes on this event loop while the block runs.

    Instead of ``settings``, fields of FakeSettings may be given.

    Raises:
        ConfigError: If a setting is wrong, or a port is taken.
    """
    settings = settings or fake_settings(**fields)
    async with AsyncExitStack() as stack:
        servers, router = await _started(settings, stack, clock=clock, ends_process=False)
        session = await stack.enter_async_context(_control_session())
        fakes = Fakes([server.address for server in servers], router.address if router else None, session)
        fakes.servers, fakes.router = servers, router
        yield fakes


@asynccontextmanager
async def start_fake_sglang(settings: FakeSettings | None = None, **fields: Any) -> AsyncIterator[Fakes]:
    """Run fakes in a process of their own, which ends with the block or with this process.

    Instead of ``settings``, fields of FakeSettings may be given.

    Raises:
        ConfigError: If a setting is wrong.
        EngineUnavailableError: If the process does not get to listening.
    """
    settings = settings or fake_settings(**fields)
    source = str(Path(rollfeed.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PROGRAM,
        msgspec.json.encode(settings).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        addresses, router = await _told_addresses(process)
        async with _control_session() as session:
            fakes = Fakes(addresses, router, session)
            fakes.process = process
            yield fakes
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def serve_fake_router(
    workers: Sequence[str], *, dialect: str, policy: str = "least_loaded"
) -> AsyncIterator[FakeRouter]:
    """Run a router on this event loop, in front of servers that run already."""
    router = FakeRouter(dialect=RouterDialect(dialect), workers=workers, policy=policy)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


def fake_settings(**fields: Any) -> FakeSettings:
    """Return settings from plain values, as JSON has them, or from the types themselves.

    Raises:
        ConfigError: If one is unknown or wrong.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(fields), FakeSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"fake SGLang: {error}") from None


async def run_fakes(
    settings: FakeSettings, tell: Callable[[Sequence[str], str | None], object], ended: asyncio.Event
) -> None:
    """Run fakes until told to end.

    ``tell`` is called with the servers' addresses and the router's, once all listen; ``ended`` ends them.
    """
    async with AsyncExitStack() as stack:
        is_alone = settings.num_workers == 1 and settings.router is None
        servers, router = await _started(settings, stack, clock=None, ends_process=is_alone)
        tell([server.address for server in servers], router.address if router else None)
        await ended.wait()


async def _started(
    settings: FakeSettings, stack: AsyncExitStack, *, clock: Clock | None, ends_process: bool
) -> tuple[tuple[FakeServer, ...], FakeRouter | None]:
    servers: list[FakeServer] = []
    for index in range(settings.num_workers):
        port = settings.port and settings.port + index
        server = FakeServer(settings, port=port, clock=clock, ends_process=ends_process)
        await server.start()
        stack.push_async_callback(server.stop)
        servers.append(server)
    if settings.router is None:
        return tuple(servers), None
    router = FakeRouter(
        dialect=settings.router,
        host=settings.host,
        port=settings.port and settings.port + settings.num_workers,
        workers=[*(server.address for server in servers), *settings.worker_urls],
        policy=settings.policy,
        api_key=settings.api_key,
    )
    await router.start()
    stack.push_async_callback(router.stop)
    return tuple(servers), router


def _control_session() -> aiohttp.ClientSession:
    # A connection each, so that a dropped one is never reused.
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_CONTROL_SECONDS))


async def _told_addresses(process: asyncio.subprocess.Process) -> tuple[list[str], str | None]:
    assert process.stdout is not None
    async with asyncio.timeout(_START_SECONDS):
        line = await process.stdout.readline()
    if not line:
        raise EngineUnavailableError(f"the fake's process ended with code {await process.wait()}")
    addresses, router_address = msgspec.json.decode(line, type=tuple[list[str], str | None])
    return addresses, router_address


def main() -> None:
    """Run what the first argument says as JSON, until standard input closes."""
    settings = msgspec.json.decode(sys.argv[1], type=FakeSettings)
    try:
        asyncio.run(_run_for_parent(settings))
    except ConfigError as error:
        sys.exit(str(error))


async def _run_for_parent(settings: FakeSettings) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Ctrl-C is for the parent, which closes our input when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    watching = asyncio.create_task(_set_at_end(reader, ended))

    def tell(addresses: Sequence[str], router_address: str | None) -> None:
        print(json.dumps([addresses, router_address]), flush=True)

    await run_fakes(settings, tell, ended)
    watching.cancel()


async def _set_at_end(reader: asyncio.StreamReader, ended: asyncio.Event) -> None:
    await reader.read()
    ended.set()
