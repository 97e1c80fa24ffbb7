"""Tools from settings: built in, of other packages, of the user's own, and of MCP servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rollfeed.base.importing import import_object, is_async
from rollfeed.config.paths import expand_path
from rollfeed.config.tools import ToolSettings
from rollfeed.errors import ConfigError, PluginError, in_one_line, suggestion
from rollfeed.protocols import ExecLimits, SandboxProvider, Tool, Workers
from rollfeed.tools.calculator import Calculator
from rollfeed.tools.files import file_tools
from rollfeed.tools.mcp_servers import mcp_tools
from rollfeed.tools.own_functions import FunctionTool
from rollfeed.tools.python import PythonTool
from rollfeed.tools.search import SearchTool

ENTRY_POINT_GROUP = "rollfeed.tools"
"""Entry points of packages: the name of a tool, and a tool, its class or a function."""

BUILT_IN = ("calculator", "files", "python", "search")
_ATTRIBUTES = ("name", "description", "parameters", "is_idempotent", "call")


def installed_entry_points() -> Iterable[EntryPoint]:
    """Return the entry points of the packages installed here; nothing is imported."""
    return entry_points(group=ENTRY_POINT_GROUP)


def make_tools(
    settings: ToolSettings,
    *,
    sandboxes: SandboxProvider,
    memory_bytes: int,
    workers: Workers,
    folders: Sequence[Path] = (),
    find_entry_points: Callable[[], Iterable[EntryPoint]] = installed_entry_points,
) -> list[Tool]:
    """Return the tools that settings name. MCP servers are started, asked what they have, and ended.

    ``find_entry_points`` returns where tools of other packages are.

    Raises:
        ConfigError: If there is no such tool, or what it needs is not there.
    """
    tools: list[Tool] = []
    for given in settings.use:
        if given == Calculator.name:
            tools.append(Calculator())
        elif given == PythonTool.name:
            limits = ExecLimits(wall_seconds=settings.timeout_seconds, memory_bytes=memory_bytes)
            tools.append(PythonTool(sandboxes, limits=limits))
        elif given == SearchTool.name:
            if settings.search is None:
                raise ConfigError("tools.use names search, which has nothing to search: set tools.search.corpus")
            tools.append(SearchTool(_place(settings.search.corpus, folders), settings.search))
        elif given == "files":
            if settings.files is None:
                raise ConfigError("tools.use names files, which have no folder: set tools.files.folder")
            tools += file_tools(_place(settings.files.folder, folders), is_writable=settings.files.is_writable)
        else:
            path, found = _find(given, folders, find_entry_points)
            tools.append(_made(path, found, folders, workers, settings.timeout_seconds))
    return tools + mcp_tools(settings.mcp, folders=folders)


def _place(path: str, folders: Sequence[Path]) -> Path:
    path = expand_path(path)
    return next((folder / path for folder in folders if (folder / path).exists()), Path(path))


def _find(
    given: Any, folders: Sequence[Path], find_entry_points: Callable[[], Iterable[EntryPoint]]
) -> tuple[str | None, Any]:
    """Return what is given, or what a path or name stands for, and its import path."""
    if not isinstance(given, str):
        return None, given
    if ":" in given:
        return given, import_object(given, key="tools.use", folders=folders)
    points = {point.name: point for point in find_entry_points()}
    if given not in points:
        own = "or name your own as module:name or file.py:name"
        raise ConfigError(f"tools.use: there is no tool {given!r}; {suggestion(given, [*BUILT_IN, *points])} {own}")
    point = points[given]
    try:
        return point.value, point.load()
    except (Exception, SystemExit) as error:  # another package's: whatever it raises is reported under its name
        raise PluginError(
            f"tool {given!r} (entry point {point.value!r}): cannot be loaded: {in_one_line(error)}"
        ) from error


def _made(path: str | None, found: Any, folders: Sequence[Path], workers: Workers, timeout_seconds: float) -> Tool:
    """Return a tool from itself, its class, or a function that is one."""
    where = path or getattr(found, "__name__", repr(found))
    if inspect.isfunction(found):
        return FunctionTool(found, path=path, folders=folders, workers=workers, timeout_seconds=timeout_seconds)
    try:
        tool: Any = found() if inspect.isclass(found) else found
    except Exception as error:
        raise PluginError(f"tools.use: {where}: making it failed: {in_one_line(error)}") from error
    lacking = [name for name in _ATTRIBUTES if not hasattr(tool, name)]
    if lacking:
        raise PluginError(f"tools.use: {where}: does not fit Tool: it lacks {', '.join(lacking)}")
    if not is_async(tool.call):
        raise PluginError(f"tools.use: {where}: does not fit Tool: call must be async; a plain function may be a tool")
    return tool  # type: ignore[no-any-return]
