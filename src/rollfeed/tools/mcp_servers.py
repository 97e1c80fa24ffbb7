"""Tools of servers that speak the Model Context Protocol: started once a run, and again where they have ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from rollfeed.config.tools import McpServerSettings
from rollfeed.errors import ConfigError, ToolError, in_one_line
from rollfeed.protocols import Tool

_INTERPRETERS = ("python", "python3")
"""Commands that stand for the interpreter that runs rollfeed."""
_MAX_PAGES = 100
_END_SECONDS = 10.0


def mcp_tools(servers: Sequence[McpServerSettings], *, folders: Sequence[Path]) -> list[Tool]:
    """Return the tools that servers say they have; each is started, asked and ended, whatever loop runs here.

    Raises:
        ConfigError: If the package mcp is not there, or a server does not start, answer or have what it should.
    """
    if not servers:
        return []
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("[[tools.mcp]] needs mcp, which is not installed: pip install 'rollfeed[tools]'") from None
    # What servers do wrong is told in one line, to policies.
    logging.getLogger("mcp.client").setLevel(logging.CRITICAL)
    tools: list[Tool] = []
    for settings in servers:
        server = _Server(settings, folders)
        tools += [McpTool(server, each) for each in _described(settings.model_dump_json(), tuple(folders))]
    return tools


@lru_cache(maxsize=64)
def _described(settings: str, folders: tuple[Path, ...]) -> list[Any]:
    """Return what a server says of its tools; it is asked once a process, in a thread, whatever loop runs here."""
    server = _Server(McpServerSettings.model_validate_json(settings), folders)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, server.tools()).result()


class McpTool:
    """Fits :class:`rollfeed.protocols.Tool`: one of a server's."""

    def __init__(self, server: _Server, described: Any) -> None:
        self.name: str = described.name
        self.description: str = described.description or described.name
        self.parameters: Mapping[str, Any] = dict(described.input_schema)
        hints = described.annotations
        self.is_idempotent = bool(hints and (hints.read_only_hint or hints.idempotent_hint))
        self._server = server

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of the answer.

        Raises:
            ToolError: If there is none, with what the server said, or that it has ended.
        """
        return await self._server.call(self.name, arguments, may_repeat=self.is_idempotent)

    async def aclose(self) -> None:
        """End the server, for all of its tools."""
        await self._server.aclose()


class _Server:
    """One server. Its connection belongs to a task of its own, as the client wants it; calls come from any task."""

    def __init__(self, settings: McpServerSettings, folders: Sequence[Path]) -> None:
        self._settings = settings
        self._folders = folders
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._closing = asyncio.Event()

    async def tools(self) -> list[Any]:
        """Start the server, ask what tools it has, and end it."""
        wanted, limit = self._settings.tools, self._settings.start_seconds
        where = f"MCP server {self._settings.name!r}"
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with asyncio.timeout(limit), self._connection(log) as client:
                    described = [each async for each in _listed(client)]
            except TimeoutError:
                raise ConfigError(f"{where} did not say within {limit:g} s what tools it has") from None
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
                    raise
                log.seek(0)
                said = next((line.strip() for line in reversed(log.readlines()) if line.strip()), "")
                cause = in_one_line(_innermost(error))
                raise ConfigError(f"{where} cannot be used: {cause}{f' ({said:.200})' if said else ''}") from error
        names = [each.name for each in described]
        if missing := [name for name in wanted or () if name not in names]:
            raise ConfigError(f"{where} has no tool {missing[0]!r}; it has {', '.join(names) or 'none'}")
        return [each for each in described if wanted is None or each.name in wanted]

    async def call(self, name: str, arguments: Mapping[str, Any], *, may_repeat: bool) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._connected()
        try:
            result = await client.call_tool(name, dict(arguments))
        except Exception as error:
            if isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED:
                raise ToolError(f"{name} failed: {error}") from error
            self._closing.set()
            if may_repeat:
                return await self.call(name, arguments, may_repeat=False)
            raise ToolError(
                f"the server of {name} has ended before it answered ({in_one_line(_innermost(error))}); it is started "
                "again for the next call"
            ) from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed and does not say why")
        return text

    async def aclose(self) -> None:
        self._closing.set()
        if self._owner is not None:
            owner, self._owner, self._client = self._owner, None, None
            await asyncio.wait({owner}, timeout=_END_SECONDS)
            owner.cancel()

    async def _connected(self) -> Any:
        """Return the client of the server, started unless it runs."""
        if self._owner is not None and self._has_ended():
            await asyncio.wait({self._owner}, timeout=_END_SECONDS)
        if self._client is None or self._has_ended():  # another call may have started it meanwhile
            self._closing = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(self._client, self._closing), name="MCP server")
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                return await asyncio.shield(self._client)
        except TimeoutError:
            self._closing.set()
            if self._owner is not None:
                self._owner.cancel()
            raise ToolError(f"the server {self._settings.name} does not start") from None

    def _has_ended(self) -> bool:
        return self._owner is None or self._owner.done() or self._closing.is_set()

    async def _own(self, client: asyncio.Future[Any], closing: asyncio.Event) -> None:
        try:
            with open(os.devnull, "w") as nowhere:  # noqa: ASYNC230 - it does not block
                async with self._connection(nowhere) as connected:
                    client.set_result(connected)
                    await closing.wait()
        except Exception as error:  # told in the next call
            if not client.done():
                cause = in_one_line(_innermost(error))
                client.set_exception(ToolError(f"the server {self._settings.name} does not start: {cause}"))
                client.exception()
        finally:
            closing.set()

    @asynccontextmanager
    async def _connection(self, log: IO[str]) -> AsyncIterator[Any]:
        from mcp import Client, StdioServerParameters, stdio_client

        settings = self._settings
        if settings.url is not None:
            async with Client(settings.url) as client:
                yield client
            return
        assert settings.command is not None
        parameters = StdioServerParameters(
            command=sys.executable if settings.command in _INTERPRETERS else settings.command,
            args=[self._placed(each) for each in settings.args],
            env=settings.env or None,
        )
        async with Client(stdio_client(parameters, errlog=log)) as client:  # type: ignore[arg-type]
            yield client

    def _placed(self, argument: str) -> str:
        places = (folder / argument for folder in self._folders)
        return next((str(place) for place in places if place.is_file()), argument)


async def _listed(client: Any) -> AsyncIterator[Any]:
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for each in page.tools:
            yield each
        cursor = page.next_cursor
        if not cursor:
            return


def _text_of(result: Any) -> str:
    texts = [part.text if part.type == "text" else f"[{part.type}, which cannot be shown]" for part in result.content]
    if not texts and result.structured_content is not None:
        with suppress(TypeError, ValueError):
            return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
