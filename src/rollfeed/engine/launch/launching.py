"""Servers of this machine: started, watched, started again when they die, and ended.

Invariant: when :meth:`ServerLauncher.close` returns, no process of a server is left; when this process is killed, its
keepers see to that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rollfeed.config.launch import LaunchSettings
from rollfeed.engine.launch import keeper
from rollfeed.engine.launch.commands import SETTING, ServerCommand, check_port
from rollfeed.engine.launch.server_log import explained
from rollfeed.errors import ConfigError, EngineError, EngineUnavailableError

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
"""For a server to end by itself when it is told to."""
_NOTICE_SECONDS = 10.0
"""Between a connection that breaks and the death behind it."""
_LONGEST_PAUSE_SECONDS = 30.0
_MARK = "ROLLFEED_LAUNCHED"

IsHealthy = Callable[[str], Awaitable[None]]
"""Raises EngineError where the server at an address is not healthy."""
OnEnd = Callable[[str, str, bool], Awaitable[None]]
"""Told the address of a server that has ended, why, and whether it stays so."""


class _Server:
    """One server and its keeper, over all of its starts."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.mark = uuid.uuid4().hex
        self.keeper: asyncio.subprocess.Process | None = None
        self.is_down = asyncio.Event()
        self.is_settled = asyncio.Event()
        """It is up, or lost."""
        self.is_lost = False
        self.starting = asyncio.Lock()
        """Held while it is started again."""
        self.ends = deque[float]()
        """Times of its deaths, by the monotonic clock."""
        self.log_start = 0


class ServerLauncher:
    """Runs servers from :meth:`start` to :meth:`close`; belongs to one event loop."""

    def __init__(self, commands: Sequence[ServerCommand], settings: LaunchSettings) -> None:
        self.log_folder: Path | None = None
        """Where servers write, a file each; a temporary folder without it."""
        self.addresses = tuple(each.address for each in commands)
        self._settings = settings
        self._servers = {each.address: _Server(each) for each in commands}
        self._tasks: list[asyncio.Task[None]] = []
        self._may_start = asyncio.Event()
        self._may_start.set()

    async def start(self, is_healthy: IsHealthy) -> None:
        """Start all servers, and return when they are healthy.

        Raises:
            EngineUnavailableError: If one cannot be started, or is not healthy in time; none is left then.
        """
        self._is_healthy = is_healthy
        if self.log_folder is None:
            self.log_folder = Path(tempfile.mkdtemp(prefix="rollfeed-servers-"))
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in self._servers.values():
                    tasks.create_task(self._start(server))
        except BaseExceptionGroup as errors:
            await self.close()
            raise _first(errors) from None
        except BaseException:
            await self.close()
            raise

    def watch(self, on_end: OnEnd) -> None:
        """Start servers again that end from now on, and tell of each end."""
        self._on_end = on_end
        self._tasks = [asyncio.create_task(self._keep_up(server)) for server in self._servers.values()]

    async def revive(self) -> bool:
        """Wait for servers that have just ended; return whether one of them is healthy again."""
        servers = [server for server in self._servers.values() if not server.is_lost]
        if not servers:
            return False
        noticed = [asyncio.ensure_future(server.is_down.wait()) for server in servers]
        await asyncio.wait(noticed, timeout=_NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for each in noticed:
            each.cancel()
        ended = [server for server in servers if server.is_down.is_set()]
        await asyncio.gather(*(server.is_settled.wait() for server in ended))
        return any(not server.is_lost for server in ended)

    async def hold(self) -> None:
        """Start nothing until :meth:`go_on`, as the memory is somebody else's; return when no start is under way."""
        self._may_start.clear()
        for server in self._servers.values():
            async with server.starting:
                pass

    def go_on(self) -> None:
        """Start servers again after :meth:`hold`."""
        self._may_start.set()

    def is_back(self, address: str) -> bool:
        """Whether the server at an address has been started again and is up."""
        server = self._servers[address]
        return bool(server.ends) and not server.is_down.is_set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(self._end(server) for server in self._servers.values()))

    async def _keep_up(self, server: _Server) -> None:
        """Start a server again whenever it ends, as long as it may."""
        settings, address = self._settings, server.command.address
        while True:
            code = await self._ended(server)
            server.is_settled.clear()
            server.is_down.set()
            why = f"{server.command.name} has ended {explained(self._log_of(server), server.log_start, code)}"
            now = time.monotonic()
            server.ends.append(now)
            while server.ends[0] < now - settings.restart_window_seconds:
                server.ends.popleft()
            if len(server.ends) > settings.max_restarts:
                why += f"; it is not started again after {settings.max_restarts} restarts ({SETTING}.max_restarts)"
                server.is_lost = True
                server.is_settled.set()
            await self._on_end(address, f"{SETTING}: {why}", server.is_lost)
            if server.is_lost:
                return
            await asyncio.sleep(min(_LONGEST_PAUSE_SECONDS, 2.0 ** (len(server.ends) - 1)))
            await self._may_start.wait()
            try:
                async with server.starting:
                    await self._start(server)
                _log.warning("%s: started again", server.command.name)
            except EngineUnavailableError as error:
                _log.warning("%s", error)

    async def _start(self, server: _Server) -> None:
        """Start a server and wait until it is healthy; where it does not get there it is ended."""
        command, log = server.command, self._log_of(server)
        _log.info("%s is being started; its log is %s", command.name, log)
        try:
            check_port(command.address)
        except ConfigError as error:
            raise EngineUnavailableError(f"{command.name}: {error}") from None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                output.write(f"rollfeed starts: {' '.join(command.words)}\n".encode())
                server.log_start = output.tell()
                output.flush()
                server.keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(_GRACE_SECONDS)),
                    *command.words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**command.environment, _MARK: server.mark},
                )
        except OSError as error:
            raise EngineUnavailableError(f"{SETTING}: {command.name} cannot be started: {error}") from error
        except asyncio.CancelledError:  # asyncio kills the keeper then, perhaps with processes below it
            await asyncio.to_thread(_kill_marked, server.mark)
            raise
        try:
            async with asyncio.timeout(self._settings.startup_timeout_seconds):
                await self._until_healthy(server)
        except TimeoutError:
            told = explained(log, server.log_start, None)  # before it says that it was told to end
            await self._end(server)
            raise EngineUnavailableError(
                f"{SETTING}: {command.name} was not healthy within startup_timeout_seconds = "
                f"{self._settings.startup_timeout_seconds:g} {told}"
            ) from None
        except BaseException:
            await self._end(server)
            raise
        server.is_down.clear()
        server.is_settled.set()

    async def _until_healthy(self, server: _Server) -> None:
        assert server.keeper is not None
        while True:
            if server.keeper.returncode is not None:
                told = explained(self._log_of(server), server.log_start, await self._ended(server))
                raise EngineUnavailableError(f"{SETTING}: {server.command.name} did not start: it ended {told}")
            try:
                await self._is_healthy(server.command.address)
                return
            except EngineError:
                await asyncio.sleep(_POLL_SECONDS)

    async def _end(self, server: _Server) -> None:
        if server.keeper is not None and server.keeper.stdin is not None:
            server.keeper.stdin.close()
            await asyncio.shield(asyncio.ensure_future(self._ended(server)))

    async def _ended(self, server: _Server) -> int:
        """Return the exit code of a server when all of it has ended."""
        assert server.keeper is not None
        code = await server.keeper.wait()
        await asyncio.to_thread(_kill_marked, server.mark)  # where it was killed, it could not see to the rest
        return code

    def _log_of(self, server: _Server) -> Path:
        assert self.log_folder is not None
        return self.log_folder / f"{self.addresses.index(server.command.address)}.log"


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found: Iterable[BaseException] = errors.exceptions
    return next((each for each in found if isinstance(each, EngineError)), errors.exceptions[0])


def _kill_marked(mark: str) -> None:
    """Kill every process whose environment has a server's mark, and those that they start meanwhile."""
    wanted = f"{_MARK}={mark}".encode()
    given_up, num_looks_without = time.monotonic() + keeper.GIVING_UP_SECONDS, 0
    # Looked twice: a process says nothing of its environment while it becomes another program.
    while num_looks_without < 2 and time.monotonic() < given_up:
        num_looks_without += 1
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    num_looks_without = 0
        time.sleep(_POLL_SECONDS / 4)
