"""Sandboxes whose isolation is found out when the first is needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rollfeed.errors import ConfigError, SandboxError
from rollfeed.protocols import Isolation, IsolationLevel, Sandbox
from rollfeed.sandbox.choosing import start_sandboxes
from rollfeed.sandbox.local import LocalSandboxes

_log = logging.getLogger(__name__)


class OnDemandSandboxes:
    """This machine's sandboxes; the first one tries out which isolation level holds, and says it in the log.

    Args:
        level: The one to insist on; None takes the best.
        max_running: Programs at once; None takes the number of cores.
        on_isolation: Told once which isolation is in force.
    """

    def __init__(
        self,
        *,
        level: IsolationLevel | None = None,
        max_running: int | None = None,
        on_isolation: Callable[[Isolation], None] | None = None,
    ) -> None:
        self._level = level
        self._max_running = max_running
        self._on_isolation = on_isolation
        self._starting = asyncio.Lock()
        self._sandboxes: LocalSandboxes | None = None
        self._refusal: ConfigError | None = None

    @property
    def isolation(self) -> Isolation:
        """What keeps the programs from the machine.

        Raises:
            SandboxError: If that has not been found out yet; :meth:`start` does.
        """
        if self._sandboxes is None:
            raise SandboxError("no sandbox has been opened yet, so that the isolation level is not known")
        return self._sandboxes.isolation

    async def start(self) -> LocalSandboxes:
        """Find out the isolation, unless it is known.

        Raises:
            ConfigError: If the level does not hold here, or none does.
        """
        async with self._starting:
            if self._refusal is not None:
                raise self._refusal
            if self._sandboxes is None:
                try:
                    sandboxes = await start_sandboxes(level=self._level, max_running=self._max_running)
                except ConfigError as error:
                    self._refusal = error
                    raise
                log = _log.info if sandboxes.isolation.files_hidden else _log.warning
                log("%s", sandboxes.isolation)
                if self._on_isolation is not None:
                    self._on_isolation(sandboxes.isolation)
                self._sandboxes = sandboxes
            return self._sandboxes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """Make an empty sandbox.

        Raises:
            SandboxError: If it cannot be made, or the isolation level does not hold.
        """
        try:
            sandboxes = await self.start()
        except ConfigError as error:
            raise SandboxError(str(error)) from error
        async with sandboxes.open() as sandbox:
            yield sandbox
